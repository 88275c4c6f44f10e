"""Chat templates: from a list of messages to the text of the prompt.

The template comes with the model, from whoever made it, and is a program. It runs in Jinja's sandbox, which keeps it
from Python; limits on its loops, on the texts it makes and on what it writes keep it from time and memory. They cover
every way to make a long text in few steps, except for writing out a list that holds itself many times over.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phasesplit.errors import SpecError, one_line

if TYPE_CHECKING:
    import jinja2

LARGEST_TEMPLATE_CHARS = 1 << 18
LARGEST_PROMPT_CHARS = 1 << 24
MOST_RANGE_STEPS = 100_000
"""Of all `range` of one rendering together."""
_LARGEST_IN_POWER = 64
_PADDING = ("center", "expandtabs", "format", "format_map", "indent", "ljust", "rjust", "wordwrap", "zfill")
"""Filters and methods of texts that can write any number of blanks."""


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: Its text.
    """

    def __init__(self, where: str, source: str, tokens: Mapping[str, str] | None = None) -> None:
        """Compile a template.

        Args:
            where: The file, for messages.
            source: Text of the template.
            tokens: Name to text of the special tokens that it may write (`bos_token`, `eos_token`).

        Raises:
            SpecError: It is too long or is not a template.
        """
        import jinja2

        self.source, self._tokens = source, dict(tokens or {})
        if len(source) > LARGEST_TEMPLATE_CHARS:
            raise SpecError.bad(
                f"{where}, length of the chat template", len(source), f"at most {LARGEST_TEMPLATE_CHARS}"
            )
        environment = _environment()
        try:
            tree = environment.parse(source)
            for joined in tree.find_all(jinja2.nodes.Concat):
                _bound(joined)
            self._template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError, MemoryError) as error:
            raise SpecError(f"{where}: the chat template is not one: {one_line(error)}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, has_generation_prompt: bool = True, **given: object
    ) -> str:
        """Return the prompt for some messages.

        Args:
            messages: As OpenAI's chat API has them: mappings with `role` and `content`.
            has_generation_prompt: Whether the start of the assistant's answer follows.
            **given: Further names that a template may read, such as `tools`.

        Raises:
            SpecError: The template refuses the messages, fails on them, or exceeds a limit.
        """
        names = {"messages": messages, "add_generation_prompt": has_generation_prompt, "range": _Steps()}
        try:
            return _within(self._template.generate({**self._tokens, **given, **names}))
        except Exception as error:
            # Clients read this: where the model lies is none of their business.
            raise SpecError(f"the chat template fails on these messages: {one_line(error)}") from None


class _Steps:
    """Jinja's `range`, with one budget for a whole rendering."""

    def __init__(self) -> None:
        self._left = MOST_RANGE_STEPS

    def __call__(self, *limits: int) -> range:
        steps = range(*limits)
        self._left -= len(steps)
        if self._left < 0:
            raise OverflowError(f"loops take more than {MOST_RANGE_STEPS} steps")
        return steps


def _within(pieces: Iterator[str]) -> str:
    kept, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > LARGEST_PROMPT_CHARS:
            raise OverflowError(f"it writes more than {LARGEST_PROMPT_CHARS} characters")
        kept.append(piece)
    return "".join(kept)


def _raise_exception(message: str) -> None:
    """Refuse the messages; templates call it by the name `raise_exception`."""
    raise ValueError(message)


def _whole(parts: Iterable[str], between: str = "") -> str:
    """Return texts joined, once their length is known to be allowed."""
    texts = list(parts)
    length = sum(map(len, texts)) + len(between) * max(len(texts) - 1, 0)
    if length > LARGEST_PROMPT_CHARS:
        raise OverflowError(f"it joins more than {LARGEST_PROMPT_CHARS} characters")
    return between.join(texts)


def _joined(*parts: object) -> str:
    return _whole(map(str, parts))


def _replaced(text: str, old: str, new: str, count: int = -1) -> str:
    """Return a text with parts replaced, once its length is known to be allowed."""
    times = text.count(old) if count < 0 else min(text.count(old), count)
    if len(text) + times * (len(new) - len(old)) > LARGEST_PROMPT_CHARS:
        raise OverflowError(f"it makes more than {LARGEST_PROMPT_CHARS} characters")
    return text.replace(old, new, count)


def _bound(node: "jinja2.nodes.Concat") -> None:
    """Let `a ~ b`, which the sandbox does not watch, go through `_joined`."""
    from jinja2 import nodes

    node.nodes = [nodes.Call(nodes.Name("_joined", "load"), list(node.nodes), [], None, None)]


def _environment() -> "jinja2.Environment":
    """Return the environment, set up as transformers sets up its own, so that templates write the same."""
    import json

    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})
        concat = staticmethod(_whole)  # of what blocks and macros wrote

        def call(self, context: Any, called: Any, /, *args: Any, **named: Any) -> Any:
            owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
            if isinstance(owner, str) and name == "replace":
                return _replaced(owner, *args, **named)
            if isinstance(owner, str) and name == "join":
                return _whole(args[0], owner)
            return super().call(context, called, *args, **named)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in _PADDING)

        def wrap_str_format(self, value: Any) -> None:
            """Leave `str.format` to `is_safe_attribute`, which refuses it."""

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                if not all(isinstance(one, int | float) and abs(one) < _LARGEST_IN_POWER for one in (left, right)):
                    raise OverflowError("a power is too large")
            elif operator == "%" and isinstance(left, str):
                raise TypeError("the operator % does not format text here")
            elif operator in "+*":
                _measure(operator, left, right)
            return super().call_binop(context, operator, left, right)

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.filters["replace"] = lambda text, old, new, count=-1: _replaced(str(text), str(old), str(new), count)
    environment.filters["join"] = lambda parts, between="": _whole(map(str, parts), str(between))
    for name in _PADDING:
        environment.filters.pop(name, None)
    del environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _raise_exception, "_joined": _joined}
    return environment


def _measure(operator: str, left: Any, right: Any) -> None:
    """Refuse a sum or a product of texts and lists that would be longer than a prompt."""
    lengths = [len(one) for one in (left, right) if isinstance(one, str | list | tuple)]
    counts = [one for one in (left, right) if isinstance(one, int)]
    length = sum(lengths) if operator == "+" else lengths[0] * max(counts[0], 0) if lengths and counts else 0
    is_long_number = operator == "*" and any(count.bit_length() > 1 << 12 for count in counts)
    if length > LARGEST_PROMPT_CHARS or is_long_number:
        raise OverflowError(f"it makes a value longer than {LARGEST_PROMPT_CHARS} characters")
