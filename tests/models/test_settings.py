"""Settings: read once, every mistake named, no secret shown."""

import pickle
from pathlib import Path

import pytest

from models.errors import ConfigurationError
from models.settings import MailServer, read_settings

SECRET = "s3cret-" * 6


def problems_of(environ):
    with pytest.raises(ConfigurationError) as error:
        read_settings(environ)
    return error.value.problems


@pytest.mark.parametrize(
    "environ", [{}, {"PORT": "", "SECRET_KEY": " ", "TOLLGATE_CONFIG": "", "PUBLIC_URL": ""}]
)
def test_nothing_set_is_development(environ):
    settings = read_settings(environ)
    assert (settings.host, settings.port, settings.processes, settings.drain_s) == (
        "127.0.0.1",
        8000,
        1,
        90,
    )
    assert settings.client_timeout_s == 30
    assert settings.data_dir == Path("data")
    assert settings.database_url == "sqlite:///data/tollgate.sqlite3"
    assert settings.sqlite_path == Path("data/tollgate.sqlite3")
    assert settings.public_url == "http://localhost:8000"
    assert not settings.production
    assert settings.log_level == "info"
    assert settings.test_checkout and settings.top_up_max_usd == 10_000
    assert settings.config_path is settings.client_ip_header is settings.metrics_token is None


def test_everything_set(tmp_path):
    config = tmp_path / "tollgate.toml"
    config.write_text("")
    settings = read_settings(
        {
            "HOST": "::",
            "PORT": "9000",
            "DATA_DIR": "/data",
            "DATABASE_URL": "postgres://user:pw@db/tollgate",
            "PUBLIC_URL": "https://gateway.example/",
            "SECRET_KEY": SECRET,
            "SMTP_URL": "smtps://us%40er:pa%3Ass@mail.example",
            "PROCESSES": "64",
            "TOLLGATE_CONFIG": str(config),
            "DRAIN_SECONDS": "300",
            "CLIENT_TIMEOUT_SECONDS": "600",
            "LOG_LEVEL": "WARNING",
            "CLIENT_IP_HEADER": "Fly-Client-IP",
            "METRICS_TOKEN": "scrape",
            "OPENAI_API_KEY": "sk-1",
        }
    )
    assert (settings.host, settings.port, settings.processes, settings.drain_s) == ("::", 9000, 64, 300)
    assert settings.client_timeout_s == 600
    assert settings.database_url == "postgres://user:pw@db/tollgate"
    assert settings.sqlite_path is None
    assert settings.public_url == "https://gateway.example"
    assert settings.production
    assert settings.secret_key == SECRET
    assert settings.mail_server == MailServer("mail.example", 465, "us@er", "pa:ss", True)
    assert settings.config_path == config
    assert (settings.log_level, settings.client_ip_header) == ("warning", "Fly-Client-IP")
    assert settings.metrics_token == "scrape"
    assert settings.environ["OPENAI_API_KEY"] == "sk-1"


def test_the_default_database_is_in_the_data_directory():
    assert read_settings({"DATA_DIR": "/data"}).database_url == "sqlite:////data/tollgate.sqlite3"
    assert read_settings({"DATA_DIR": "/data"}).sqlite_path == Path("/data/tollgate.sqlite3")


def test_the_default_public_url_has_the_port():
    assert read_settings({"PORT": "8123"}).public_url == "http://localhost:8123"


@pytest.mark.parametrize(
    "url", ["sqlite:///relative.db", "sqlite:////absolute.db", "postgresql:///db?host=/tmp/pg"]
)
def test_database_urls(url):
    assert read_settings({"DATABASE_URL": url}).database_url == url


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOST", "not a host"),
        ("PORT", "0"),
        ("PORT", "65536"),
        ("PORT", "80a"),
        ("PORT", "-1"),
        ("PORT", "1_000"),
        ("PROCESSES", "0"),
        ("PROCESSES", "65"),
        ("PROCESSES", "two"),
        ("DRAIN_SECONDS", "0"),
        ("DRAIN_SECONDS", "301"),
        ("DRAIN_SECONDS", "1.5"),
        ("CLIENT_TIMEOUT_SECONDS", "0"),
        ("CLIENT_TIMEOUT_SECONDS", "601"),
        ("LOG_LEVEL", "loud"),
        ("SECRET_KEY", "x" * 31),
        ("TOLLGATE_CONFIG", "/nowhere/tollgate.toml"),
        ("CLIENT_IP_HEADER", "X Forwarded For"),
        ("DATABASE_URL", "mysql://db/tollgate"),
        ("DATABASE_URL", "sqlite://file.db"),
        ("DATABASE_URL", "sqlite:///"),
        ("DATABASE_URL", "sqlite:///:memory:"),
        ("DATABASE_URL", "postgres://"),
        ("PUBLIC_URL", "gateway.example"),
        ("PUBLIC_URL", "ftp://gateway.example"),
        ("PUBLIC_URL", "https://"),
        ("PUBLIC_URL", "https://gateway.example/path"),
        ("PUBLIC_URL", "https://gateway.example?x=1"),
        ("PUBLIC_URL", "https://gateway.example#x"),
        ("PUBLIC_URL", "https://me:pw@gateway.example"),
        ("PUBLIC_URL", "https://gateway.example:99999"),
        ("PUBLIC_URL", "https://gate way.example"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name, value):
    problems = problems_of({name: value})
    assert len(problems) == 1
    assert problems[0].startswith(f"{name}: ")


def test_every_problem_is_reported_at_once():
    problems = problems_of({"PORT": "x", "PROCESSES": "x", "LOG_LEVEL": "x", "DATABASE_URL": "x"})
    assert [problem.split(":")[0] for problem in problems] == [
        "PORT",
        "DATABASE_URL",
        "PROCESSES",
        "LOG_LEVEL",
    ]


def test_production_needs_a_secret_key():
    assert problems_of({"PUBLIC_URL": "https://gateway.example"})[0].startswith("SECRET_KEY: missing")
    secured = {"PUBLIC_URL": "https://gateway.example", "SECRET_KEY": "x" * 32}
    assert read_settings({**secured, "MAIL_TO_CONSOLE": "yes"}).production


def test_production_needs_a_mail_server_unless_told_otherwise():
    secured = {"PUBLIC_URL": "https://gateway.example", "SECRET_KEY": "x" * 32}
    for more in ({}, {"MAIL_TO_CONSOLE": "no"}):
        (problem,) = problems_of({**secured, **more})
        assert problem.startswith("SMTP_URL: missing") and "MAIL_TO_CONSOLE=yes" in problem
    settings = read_settings({**secured, "SMTP_URL": "smtp://mail.example"})
    assert settings.mail_server == MailServer("mail.example", 587, None, None, False)
    assert settings.mail_from == "no-reply@gateway.example"
    assert read_settings({**secured, "MAIL_TO_CONSOLE": "yes"}).mail_server is None
    assert read_settings({}).mail_server is None


@pytest.mark.parametrize("text", [
    "mail.example", "smtp://", "http://mail.example", "smtp://mail.example/path", "smtp://mail.example:99999",
    "smtp://mail.example?tls=no", "smtp://mail.example:0",
])
def test_what_is_no_mail_server(text):
    (problem,) = problems_of({"SMTP_URL": text})
    assert problem.startswith("SMTP_URL: write")


@pytest.mark.parametrize("text", ["nobody", "a@b\r\nBcc: x@y", "Name <a@b", "<a@b> more", "a@b@c"])
def test_what_is_no_sender(text):
    (problem,) = problems_of({"MAIL_FROM": text})
    assert problem.startswith("MAIL_FROM: ")


def test_a_sender_may_have_a_name():
    assert read_settings({"MAIL_FROM": "Tollgate <mail@gateway.example>"}).mail_from.startswith("Tollgate <")


def test_development_makes_a_new_secret_key_at_every_start():
    one, other = read_settings({}).secret_key, read_settings({}).secret_key
    assert one != other
    assert len(one) >= 32


def test_no_secret_shows():
    settings = read_settings(
        {
            "SECRET_KEY": SECRET,
            "METRICS_TOKEN": "hidden-token",
            "DATABASE_URL": "postgres://user:hidden-password@db/tollgate",
            "ACME_KEY": "hidden-key",
            "SMTP_URL": "smtp://user:hidden-word@mail.example",
        }
    )
    assert "hidden" not in repr(settings)
    assert SECRET not in repr(settings)
    assert "s3cret" not in str(settings)


def test_problems_do_not_repeat_secrets():
    text = " ".join(problems_of({"SECRET_KEY": "hidden", "DATABASE_URL": "mysql://user:hidden@db"}))
    assert "hidden" not in text


def test_settings_travel_to_other_processes():
    settings = read_settings({"ACME_KEY": "k"})
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_later_changes_of_the_environment_do_not_reach_in():
    environ = {"ACME_KEY": "k"}
    settings = read_settings(environ)
    environ["ACME_KEY"] = "other"
    assert settings.environ["ACME_KEY"] == "k"
