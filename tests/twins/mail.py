"""A mail server for tests: it takes mail, or refuses it as it is told to, and can ask for a password and TLS."""

from __future__ import annotations

import datetime
import socket
import ssl
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, Session
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass
class MailTwin:
    """Keep the mails that came. `answers` are replies to give to the next messages before one is taken."""

    user: str | None = None
    password: str | None = None
    mails: list[EmailMessage] = field(default_factory=list)
    recipients: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    refused_recipients: dict[str, str] = field(default_factory=dict)
    tries: int = 0
    encrypted: list[bool] = field(default_factory=list)
    certificate: tuple[Path, Path] | None = None
    port: int = 0
    _controller: Controller | None = None

    def start(self) -> MailTwin:
        """Listen on a free port."""
        options: dict[str, object] = {}
        if self.user is not None:
            options |= {"authenticator": self._authenticate, "auth_required": True, "auth_require_tls": False}
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*map(str, self.certificate))
            options["tls_context"] = context
        with socket.socket() as probe:  # the library cannot take port 0
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._controller = Controller(self, hostname="127.0.0.1", port=self.port, **options)
        self._controller.start()
        return self

    def stop(self) -> None:
        """Listen no more."""
        assert self._controller is not None
        self._controller.stop()

    async def handle_RCPT(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        """Take a recipient unless told otherwise."""
        if address in self.refused_recipients:
            self.tries += 1
            return self.refused_recipients[address]
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        """Take a mail unless told otherwise."""
        self.tries += 1
        if self.answers:
            return self.answers.pop(0)
        self.mails.append(message_from_bytes(envelope.content, policy=policy.default))
        self.recipients += envelope.rcpt_tos
        self.encrypted.append(session.ssl is not None)
        return "250 OK"

    def _authenticate(
        self, server: SMTP, session: Session, envelope: Envelope, mechanism: str, data: object
    ) -> AuthResult:
        good = (data.login, data.password) == (self.user.encode(), self.password.encode())
        return AuthResult(success=good, handled=good)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for localhost that nobody signed, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, secret = folder / "mail.pem", folder / "mail.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ))
    return certificate, secret
