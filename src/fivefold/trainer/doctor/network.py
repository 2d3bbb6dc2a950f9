"""The network: interfaces, the one gloo would use, and whether this host's name leads back to it."""

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from ipaddress import ip_address

from fivefold.trainer.doctor.finding import Finding

SLOW_SECONDS = 2.0  # a look-up of the own name takes a millisecond where DNS works
SIOCGIFADDR = 0x8915  # linux/sockios.h


def check_network(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Linux only as far as interfaces go: elsewhere their addresses need a library."""
    interfaces = addresses()
    with_address = [f"{name} {address}".strip() for name, address in interfaces.items() if address]
    yield Finding("Network", "interfaces", ", ".join(with_address or interfaces))
    started = time.monotonic()
    host, resolved = socket.gethostname(), _resolve()
    seconds = time.monotonic() - started
    if seconds > SLOW_SECONDS:
        mend = f"every start waits {seconds:.0f} s for it: add {host} to /etc/hosts"
        yield Finding("Network", "host name", f"{host} resolves slowly", "problem", mend)
    elif resolved:
        yield Finding("Network", "host name", f"{host} is {resolved}", "good")
    else:
        mend = "ranks on one host do without; across hosts add it to DNS or /etc/hosts"
        yield Finding("Network", "host name", f"{host} does not resolve", "note", mend)
    yield _gloo(environment, interfaces, resolved)


def addresses() -> dict[str, str]:
    """The network interfaces of this host with their IPv4 addresses ("" without)."""
    if sys.platform != "linux":
        return {name: "" for _, name in socket.if_nameindex()}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
            except OSError:
                found[name] = ""
    return found


def _resolve() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _gloo(environment: Mapping[str, str], interfaces: Mapping[str, str], resolved: str) -> Finding:
    """gloo listens on GLOO_SOCKET_IFNAME, else on the address of the host's name, else on loopback."""
    wanted = environment.get("GLOO_SOCKET_IFNAME")
    reachable = [name for name, address in interfaces.items() if address and not _is_loopback(address)]
    advice = f"GLOO_SOCKET_IFNAME={reachable[0]}" if reachable else "an interface with an address"
    if wanted is not None:
        missing = [name for name in wanted.split(",") if name not in interfaces]
        if missing:
            mend = f"no interface {missing[0]}: unset it, or use one of {', '.join(interfaces)}"
            return Finding("Network", "gloo", f"GLOO_SOCKET_IFNAME={wanted}", "problem", mend)
        return Finding("Network", "gloo", f"{wanted}, by GLOO_SOCKET_IFNAME", "good")
    if not resolved or _is_loopback(resolved):
        mend = f"fine on one host; across hosts nobody would reach it: set {advice}"
        return Finding("Network", "gloo", f"{resolved or '127.0.0.1'} (loopback)", "note", mend)
    name = next((name for name, address in interfaces.items() if address == resolved), "?")
    return Finding("Network", "gloo", f"{name} ({resolved}), by the host's name", "good")


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback
