# The packages, each checked by its hash, in a virtual environment. Wheels only: there is no compiler
# here, and no package's code runs on installing it.
FROM python:3.11-slim AS packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /venv
COPY requirements.lock /build/requirements.lock
RUN python -m pip --python /venv/bin/python install --quiet \
      --require-hashes --no-deps --only-binary :all: -r /build/requirements.lock \
 && /venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /venv/lib

FROM python:3.11-slim AS server
# A fixed number, so that a volume keeps its owner from one image to the next.
RUN groupadd --gid 10001 tollgate \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent \
      --shell /usr/sbin/nologin tollgate \
 && install -d -o 10001 -g 10001 -m 0750 /data

COPY --from=packages /venv /venv
WORKDIR /app
COPY pyproject.toml LICENSE ./
COPY api api
COPY models models
COPY portal portal
COPY templates templates
COPY static static
# The root file system may be read-only at run time, so the bytecode is made now, for good.
RUN /venv/bin/python -m compileall -q --invalidation-mode unchecked-hash api models portal

# /data holds the database and the stored files. Temporary files go there as well: with a read-only
# root file system there may be no other place to write to.
ENV PATH=/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOST=0.0.0.0 \
    PORT=8000 \
    DATA_DIR=/data \
    TMPDIR=/data
VOLUME /data
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM

# Alive, not ready: a process that drains or waits for its database must not be killed for it.
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python", "-c", "import os; from urllib.request import urlopen; urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/healthz', timeout=4)"]

ENTRYPOINT ["python", "-m", "portal"]
CMD ["serve"]

# Fly.io hands over a new volume as root's, whatever the image says. This target, which fly.toml names,
# gives it to the server's user and then becomes that user, for good.
FROM server AS fly
USER root
ENTRYPOINT ["sh", "-c", "chown 10001:10001 /data && exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs python -m portal \"$@\"", "portal"]
CMD ["serve"]

# The last stage is what `docker build` makes when no target is named.
FROM server
