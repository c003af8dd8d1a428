"""The certificate of a service whose workers are placed on other machines: made when it starts, kept in memory.

Its workers get it with their configuration and trust no other, so no file of keys has to be made or copied.
"""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from penstock.errors import UnavailableError
from penstock.extras import install_command

__all__ = ["OwnCertificate"]

_LIFE: Final = timedelta(days=3650)


class OwnCertificate:
    """A certificate for one IP address that signs itself, and its key (ECDSA, P-256), as files in memory.

    ``certificate`` and ``key`` are paths that this process can open.  Raises UnavailableError without ``cryptography``.
    """

    def __init__(self, address: str) -> None:
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError:
            raise UnavailableError(
                f"A cluster requires the package cryptography. Run `{install_command('cluster')}`."
            ) from None
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "penstock")])
        now = datetime.now(UTC)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).add_extension(names, critical=False)
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + _LIFE)
        certificate = builder.sign(key, hashes.SHA256())
        pem = serialization.Encoding.PEM
        self._files = [
            _in_memory("certificate", certificate.public_bytes(pem)),
            _in_memory(
                "key",
                key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
            ),
        ]
        self.certificate, self.key = (Path(f"/proc/self/fd/{file}") for file in self._files)

    def close(self) -> None:
        """Forget both.  Further calls do nothing."""
        for file in self._files:
            os.close(file)
        self._files = []


def _in_memory(name: str, data: bytes) -> int:
    """Return a descriptor, which no child process inherits, of a file in memory with ``data``."""
    file = os.memfd_create(f"penstock-{name}", os.MFD_CLOEXEC)
    os.write(file, data)
    return file
