"""The base of all sections of the config."""

from msgspec import Struct


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, keys by name only, unknown keys refused."""
