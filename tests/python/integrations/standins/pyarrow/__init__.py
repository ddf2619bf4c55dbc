"""Names that TRL imports and a small run does not use; see ../datasets."""


class Array: ...


class Table: ...
