"""How peers prove who they are: a shared token, or keys of CurveZMQ; read from ``storage_options``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ..errors import ConfigError

__all__ = ["ClientCredentials", "ServerCredentials"]

_CURVE_KEY = 40  # characters of a key in Z85
_SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class ClientCredentials:
    """What a client shows a server; nothing of it appears in ``repr``.

    Attributes
    ----------
    token : bytes
        Shared by both sides; empty for none. It never crosses the network.
    curve_server_key, curve_public_key, curve_secret_key : str
        Keys in Z85, as ``zmq.curve_keypair()`` makes them; all three or none.
    """

    token: bytes = field(default=b"", repr=False)
    curve_server_key: str = field(default="", repr=False)
    curve_public_key: str = field(default="", repr=False)
    curve_secret_key: str = field(default="", repr=False)

    @property
    def asks(self) -> bool:
        """Whether a server has to prove anything."""
        return bool(self.token or self.encrypts)

    @property
    def encrypts(self) -> bool:
        """Whether what travels has to be encrypted."""
        return bool(self.curve_server_key)

    @classmethod
    def of(cls, options: Mapping[str, Any], where: str) -> Self:
        """From the ``storage_options`` of a peer tier.

        Raises
        ------
        ConfigError
            An option is unknown or malformed, or keys are incomplete; values are not repeated.
        """
        curve = ("curve_server_key", "curve_public_key", "curve_secret_key")
        _check_names(options, ("token", *curve), where)
        keys = {name: _read_key(options[name], name, where) for name in curve if name in options}
        if keys and len(keys) < len(curve):
            raise ConfigError(f"{where}: storage_options: CurveZMQ takes all of {', '.join(curve)}")
        return cls(token=_read_token(options, where), **keys)


@dataclass(frozen=True)
class ServerCredentials:
    """What a server asks of its clients; nothing of it appears in ``repr``.

    Attributes
    ----------
    token : bytes
        Shared by both sides; empty for none.
    curve_secret_key : str
        The server's secret key in Z85; empty for none.
    allowed_keys : tuple of str
        Public keys of the clients that may connect.
    """

    token: bytes = field(default=b"", repr=False)
    curve_secret_key: str = field(default="", repr=False)
    allowed_keys: tuple[str, ...] = field(default=(), repr=False)

    @property
    def asks(self) -> bool:
        """Whether clients have to prove anything."""
        return bool(self.token or self.encrypts)

    @property
    def encrypts(self) -> bool:
        """Whether what travels has to be encrypted."""
        return bool(self.curve_secret_key)

    @classmethod
    def of(cls, options: Mapping[str, Any], where: str) -> Self:
        """From the ``storage_options`` of a host tier that is served.

        Raises
        ------
        ConfigError
            An option is unknown or malformed, or keys are incomplete; values are not repeated.
        """
        _check_names(options, ("token", "curve_secret_key", "allowed_keys"), where)
        allowed = options.get("allowed_keys", ())
        if isinstance(allowed, str) or not isinstance(allowed, list | tuple):
            raise ConfigError(f"{where}: storage_options: allowed_keys is a list of public keys")
        if bool(allowed) != ("curve_secret_key" in options):
            raise ConfigError(f"{where}: storage_options: CurveZMQ takes curve_secret_key and allowed_keys")
        secret = options.get("curve_secret_key")
        return cls(
            token=_read_token(options, where),
            curve_secret_key=_read_key(secret, "curve_secret_key", where) if allowed else "",
            allowed_keys=tuple(_read_key(key, "allowed_keys", where) for key in allowed),
        )


def _check_names(options: Mapping[str, Any], valid: tuple[str, ...], where: str) -> None:
    for name in options:
        if name not in valid:
            raise ConfigError(f"{where}: storage_options: unknown {name!r}; valid: {', '.join(valid)}")


def _read_token(options: Mapping[str, Any], where: str) -> bytes:
    token = options.get("token", "")
    if not isinstance(token, str) or ("token" in options and len(token) < _SHORTEST_TOKEN):
        raise ConfigError(
            f"{where}: storage_options: token is text of at least {_SHORTEST_TOKEN} characters; "
            "python -c 'import secrets; print(secrets.token_hex())' makes one"
        )
    return token.encode()


def _read_key(value: object, name: str, where: str) -> str:
    if not isinstance(value, str) or len(value) != _CURVE_KEY:
        raise ConfigError(
            f"{where}: storage_options: {name} takes keys of {_CURVE_KEY} characters, "
            "as zmq.curve_keypair() makes them"
        )
    return value
