"""Numbers of things, in words."""

_ES = ("tch", "sh", "s", "x")  # of "epoch", "epochs"


def counted(number: int, noun: str, spec: str = "") -> str:
    """Returns such as "1 batch", "0 batches" or, with the format `,`, "1,200 samples".

    Args:
        number: How many.
        noun: The counted thing, in the singular; its plural ends in "s" or "es".
        spec: The format of the number.
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:{spec}} {noun}{'es' if noun.endswith(_ES) else 's'}"
