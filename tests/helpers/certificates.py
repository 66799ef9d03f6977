"""A certificate for tests of connections with TLS."""

import shutil
import subprocess
from pathlib import Path

import pytest


def self_signed(folder: Path) -> dict[str, Path]:
    """Return a new certificate for `localhost`, signed with its own key, as settings of a server.

    Args:
        folder: folder for the files.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the program openssl, which makes the certificate, is not installed")
    paths = {"tls_cert": folder / "cert.pem", "tls_key": folder / "key.pem"}
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-out", str(paths["tls_cert"]), "-keyout", str(paths["tls_key"])]
    subprocess.run([openssl, *words, *names, *files], check=True, capture_output=True)
    return paths
