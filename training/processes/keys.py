"""The ring's key pair: only its holders pass the handshake (CurveZMQ).

One pair serves a whole ring: every server uses it as its server key and every client as its client key. So a client
needs the public half for the handshake, and the secret half to be admitted. Server sockets ask the context's
authenticator (ZAP, RFC 27), which admits only that public key.
"""

import asyncio
import ipaddress
import stat
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.auth import Authenticator

from configurable.files import create_private_file

_DOMAIN, _NAMES_DOMAIN = "starling", "starling names"
_ANY_PASSWORD = "-"  # noqa: S105
"""Clients are admitted by their name alone, but ZeroMQ requires a password."""
_HEADER = "starling ring key 1"

_guards: "weakref.WeakKeyDictionary[zmq.Context[Any], _Guard]" = weakref.WeakKeyDictionary()
_guards_lock = threading.Lock()


class KeyFileError(ValueError):
    """A key file that cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True)
class RingKey:
    """A CURVE key pair.

    Attributes:
        public: The public half, 40 characters of Z85.
        secret: The secret half, 40 characters of Z85; never printed.
    """

    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not _fits(self.public, self.secret):
            raise ValueError("not a CURVE key pair: the two halves, 40 characters of Z85 each, must belong together")

    @classmethod
    def generate(cls) -> "RingKey":
        """Generate a new pair."""
        return cls(*zmq.curve_keypair())

    def save(self, path: Path) -> None:
        """Write the pair to a new file that only its owner may read.

        Raises:
            KeyFileError: If the file exists.
        """
        text = f"{_HEADER}\npublic {self.public.decode()}\nsecret {self.secret.decode()}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            create_private_file(path, text.encode("ascii"))
        except FileExistsError:
            raise KeyFileError(f"{path} exists: a ring's key is never replaced; remove it or name another") from None

    @classmethod
    def load(cls, path: Path) -> "RingKey":
        """Read a pair from a file.

        Raises:
            KeyFileError: If the file is missing, readable by others, or not a key.
        """
        try:
            mode = path.stat().st_mode
            text = path.read_text(encoding="ascii")
        except FileNotFoundError:
            raise KeyFileError(f"no key file {path}: make one with `starling key {path}` and copy it there") from None
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFileError(f"cannot read the key file {path} ({error}): copy the ring's key there again") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise KeyFileError(f"other users may read the key file {path}: run `chmod 600 {path}`")
        lines = text.splitlines()
        words = dict(line.split(" ", 1) for line in lines[1:] if " " in line)
        try:
            if lines[:1] != [_HEADER]:
                raise ValueError("another header")
            return cls(words["public"].encode("ascii"), words["secret"].encode("ascii"))
        except (ValueError, KeyError):
            raise KeyFileError(f"{path} is not a ring key: make one with `starling key` or copy it again") from None


def _fits(public: bytes, secret: bytes) -> bool:
    """Whether two halves are well-formed and belong together."""
    try:
        return len(public) == 40 and len(secret) == 40 and zmq.curve_public(secret) == public
    except (ValueError, zmq.ZMQError):
        return False


def is_local(endpoint: str) -> bool:
    """Whether a ZeroMQ endpoint cannot be reached from another machine."""
    kind, _, rest = endpoint.partition("://")
    if kind in ("ipc", "inproc"):
        return True
    host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def secure_server(ctx: "zmq.Context[Any]", socket: "zmq.Socket[Any]", key: RingKey | None, endpoint: str) -> None:
    """Set up a server socket; call this before binding it.

    Args:
        ctx: The socket's context; gets an authenticator, which ends with the context.
        socket: The socket.
        key: The ring's key; None for no encryption.
        endpoint: Endpoint that the socket will be bound to.

    Raises:
        ValueError: If there is no key and the endpoint is not local, or the context already serves another key.
    """
    if key is None:
        _need_local(endpoint)
        return
    _guard(ctx, key)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator, refuse all instead of admitting all
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)


def secure_client(socket: "zmq.Socket[Any]", key: RingKey | None, endpoint: str) -> None:
    """Set up a client socket; call this before connecting it.

    Args:
        socket: The socket.
        key: The ring's key; None for no encryption.
        endpoint: Endpoint that the socket will be connected to.

    Raises:
        ValueError: If there is no key and the endpoint is not local.
    """
    if key is None:
        _need_local(endpoint)
        return
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)


def _need_local(endpoint: str) -> None:
    if not is_local(endpoint):
        raise ValueError(
            f"{endpoint} can be reached from other machines and there is no key: give a key file "
            "(launch.key_file) or use a loopback address"
        )


def secure_by_name(socket: "zmq.Socket[Any]") -> None:
    """Set up a server socket that admits clients by name; call this before binding it.

    A name is not secret: it only keeps strangers out, and messages must be protected by other means. The context also
    needs a socket with the ring's key, because that starts the authenticator.
    """
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _NAMES_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.PLAIN_SERVER, 1)


def call_by_name(socket: "zmq.Socket[Any]", name: bytes) -> None:
    """Set up a client socket for a server socket of `secure_by_name`; call this before connecting it."""
    socket.setsockopt(zmq.ROUTING_ID, name)
    socket.setsockopt(zmq.PLAIN_USERNAME, name)
    socket.setsockopt_string(zmq.PLAIN_PASSWORD, _ANY_PASSWORD)


def admit(ctx: "zmq.Context[Any]", name: bytes) -> None:
    """Admit a name to the sockets of `secure_by_name`."""
    _guards[ctx].names[name.decode(errors="replace")] = _ANY_PASSWORD


def dismiss(ctx: "zmq.Context[Any]", name: bytes) -> None:
    """Stop admitting a name; its existing connections stay."""
    _guards[ctx].names.pop(name.decode(errors="replace"), None)


@dataclass
class _Guard:
    """Clients that a context's authenticator admits: holders of the key, and names."""

    public: bytes
    names: dict[str, str] = field(default_factory=dict)
    """PLAIN passwords by name; read by the authenticator."""

    def callback(self, _domain: str, public: bytes) -> bool:
        """Whether a client's public key is the ring's; called by the authenticator."""
        return public == self.public


def _guard(ctx: "zmq.Context[Any]", key: RingKey) -> None:
    """Start a context's authenticator, unless it is running."""
    with _guards_lock:
        present = _guards.get(ctx)
        if present is not None:
            if present.public != key.public:
                raise ValueError("this ZeroMQ context serves another ring's key: use a separate context")
            return
        # ctx.destroy() does not close the sockets of a shadow context while a thread uses them
        authenticator = Authenticator(zmq.Context.shadow(ctx))
        guard = _Guard(key.public)
        authenticator.configure_curve_callback(_DOMAIN, guard)
        authenticator.passwords[_NAMES_DOMAIN] = guard.names
        authenticator.start()
        _guards[ctx] = guard
        threading.Thread(target=_authenticate, args=(authenticator,), name="zap", daemon=True).start()


def _authenticate(authenticator: Authenticator) -> None:
    """Answer the context's ZAP requests until the context ends; zmq.auth's own thread would outlive it."""
    loop = asyncio.new_event_loop()
    try:
        while True:
            loop.run_until_complete(authenticator.handle_zap_message(authenticator.zap_socket.recv_multipart()))
    except zmq.ZMQError:
        pass  # the context has ended
    finally:
        authenticator.stop()
        loop.close()
