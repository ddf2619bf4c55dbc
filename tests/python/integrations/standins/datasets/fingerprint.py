"""A name that TRL imports."""


class Hasher: ...
