"""The errors of maskpack. Every message names the call, the field, what was seen, what was expected
and what to do; an error leaves its input as it was."""


class MaskpackError(Exception):
    """Base of every error that maskpack raises on purpose."""


class RegistryError(MaskpackError):
    """A registry entry cannot be used: unknown axis, missing pad token id, a pad that its dtype cannot hold."""


class LayoutError(MaskpackError):
    """Shapes, masks and row lengths that do not fit each other."""


class CoverageError(MaskpackError):
    """Strict mode found tensors that would travel dense."""


class LossyPadError(MaskpackError):
    """A field holds values other than its pad where its mask says there is nothing."""


class WireFormatError(MaskpackError):
    """Bytes that are no packed batch: cut off, changed, of another version, or made to mislead."""


class MaskpackWarning(UserWarning):
    """Something stayed exact but travels larger than it could."""
