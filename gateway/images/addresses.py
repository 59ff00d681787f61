"""Which addresses may be connected to on behalf of a stranger."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# Everything that has been given out for the internet. What else is global by name (NAT64, site-local,
# IPv4-mapped and -compatible) leads to places that another address names.
_IPV6_INTERNET = IPv6Network("2000::/3")
_IPV6_TUNNELS = (IPv6Network("2001::/32"), IPv6Network("2002::/16"))
_IPV4_INSIDE = (
    IPv4Network("192.0.0.0/24"),  # protocol assignments, NAT64 among them
    IPv4Network("168.63.129.16/32"),  # public by its number, and yet the host of a cloud's virtual machine
)


class AddressGuard:
    """Decides about addresses: those of the internet may be connected to, and those that an operator names.

    Args:
        allowed_networks: further networks, as CIDR.

    Raises:
        ValueError: an entry is no network.
    """

    def __init__(self, allowed_networks: Sequence[str] = ()) -> None:
        self._allowed: list[Network] = [ip_network(network) for network in allowed_networks]

    def allows(self, text: str) -> bool:
        """Whether the address written as ``text`` may be connected to; False for what is no address."""
        try:
            address = ip_address(text)
        except ValueError:
            return False
        return is_public(address) or any(address in network for network in self._allowed)


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet, and no way to any other."""
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _IPV4_INSIDE)
    return address in _IPV6_INTERNET and not any(address in tunnel for tunnel in _IPV6_TUNNELS)
