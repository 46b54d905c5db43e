"""The decorator of public calls, which makes their TypeError for an unknown keyword name the right keyword."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, overload

from .elsewhere import ELSEWHERE, OF_ONE_CALL

_Call = TypeVar("_Call", bound=Callable[..., Any])
_CONSTRUCTORS = ("__init__", "__new__")
# torch.compile would run the NumPy code of calls as operations of PyTorch, which round differently
UNTRACED = {
    "_torchdynamo_disable": True,
    "_torchdynamo_disable_msg": "compiled graphs contain only cuflash.torch.attention without out=: call this outside",
}
_AS_CLOSE = 0.75  # similarity (difflib's ratio) from which a misspelt name counts as a known name


@overload
def explains_keywords(call: _Call) -> _Call: ...


@overload
def explains_keywords(
    *, advice: str, takes: Callable[[int, Sequence[str]], bool] | None = None
) -> Callable[[_Call], _Call]: ...


def explains_keywords(
    call: Any = None, *, advice: str = "", takes: Callable[[int, Sequence[str]], bool] | None = None
) -> Any:
    """Decorate a public call so that its TypeError for an unknown keyword names the right keyword.

    Parameters
    ----------
    call : function or class
        A function is wrapped. A class is changed in place and returned: this wraps its constructor, and all public
        methods that no base class has.
    advice : str, optional
        The message of the constructor's TypeError if arguments do not match its signature.
    takes : callable (number of positional arguments, keywords) -> bool, optional
        Returns False for arguments that match the signature but are ambiguous; the constructor refuses them too.

    Returns
    -------
    function or class
        The decorated call, with the signature, name and docstring of the original.

    Examples
    --------
    >>> @explains_keywords
    ... def attention(q, k, v, *, causal=False, scale=None): ...
    >>> attention(1, 2, 3, softmax_scale=0.5)
    Traceback (most recent call last):
        ...
    TypeError: attention() has no softmax_scale: use scale=
    """
    if call is None:
        return partial(explains_keywords, advice=advice, takes=takes)
    if not isinstance(call, type):
        return _explained(call)
    for name, member in list(vars(call).items()):
        is_own = not name.startswith("_") and not any(hasattr(base, name) for base in call.__bases__)
        if not is_own and name not in _CONSTRUCTORS:
            continue
        if isinstance(member, (classmethod, staticmethod)):
            setattr(call, name, type(member)(_explained(member.__func__)))
        elif name == "__init__":
            setattr(call, name, _refusing(_explained(member, advice), takes, advice))
        elif inspect.isfunction(member):
            setattr(call, name, _explained(member))
    return call


def _explained(function: Any, advice: str = "") -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # If the traceback has no frame of the function, Python raised the error when it bound the arguments.
            if (kwargs or advice) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
                message = _unknown_keywords(function, kwargs) or advice
                if message:
                    raise TypeError(message) from None
            raise

    vars(call).update(UNTRACED)
    return call


def _refusing(initialize: Any, takes: Callable[[int, Sequence[str]], bool] | None, advice: str) -> Any:
    if takes is None:
        return initialize

    @wraps(initialize)
    def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
        if not takes(len(args), list(kwargs)):
            raise TypeError(advice)
        initialize(self, *args, **kwargs)

    return initialized


def _unknown_keywords(function: Callable[..., Any], keywords: Iterable[str]) -> str:
    """Return the error message for keywords that a function lacks, or an empty string if it has all of them."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ""
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    qualified = function.__qualname__.rpartition("<locals>.")[2]
    owner, _, name = qualified.rpartition(".")
    if owner:
        names = names[1:] if names[:1] in (["self"], ["cls"], ["_cls"]) else names
        qualified = owner if name in (*_CONSTRUCTORS, "__call__") else qualified
    return _answers(qualified, names, [each for each in keywords if each not in names])


def require_own_names(call: str, keywords: Iterable[str], own: Iterable[str]) -> None:
    """Refuse keywords of other libraries in a method of a plan, which takes arrays under names that users choose.

    Parameters
    ----------
    call : str
        The name of the method.
    keywords : iterable of str
        The keywords of the call.
    own : iterable of str
        The names of the plan's arrays in addition to q, k and v.
    """
    if not ELSEWHERE.keys().isdisjoint(keywords):
        names = ["q", "k", "v", *own]
        unknown = [name for name in keywords if name in ELSEWHERE and name not in names]
        if unknown:
            raise TypeError(_answers(call, names, unknown))


def require_keywords(call: str, keywords: Iterable[str], names: Collection[str]) -> None:
    """Raise a TypeError for keywords of a call that are not among its names."""
    unknown = [each for each in keywords if each not in names]
    if unknown:
        raise TypeError(_answers(call, list(names), unknown))


def _answers(call: str, names: Sequence[str], unknown: Sequence[str]) -> str:
    answers = [f"{call}() has no {each}: {_answer(call, names, each)}" for each in unknown]
    return "\n- ".join([f"{len(answers)} unknown keywords:", *answers]) if len(answers) > 1 else "".join(answers)


def _answer(call: str, names: Sequence[str], keyword: str) -> str:
    if (call, keyword) in OF_ONE_CALL:
        return OF_ONE_CALL[call, keyword]
    sentences = ELSEWHERE.get(keyword, [])
    for sentence in sorted(sentences, key=lambda each: not keywords_of(each)):
        needed = keywords_of(sentence) or {"q"}
        if needed <= set(names):
            return sentence
    close = difflib.get_close_matches(keyword.lower(), names, n=1, cutoff=_AS_CLOSE)
    if close:
        return f"did you mean {close[0]}=?"
    takes = f"it takes {', '.join(names)}" if names else "it takes no arguments"
    where = "cuflash.plan" if call.startswith("Plan.") else "cuflash.attention"
    return f"{takes}; in {where}, {sentences[0]}" if sentences else takes


def keywords_of(sentence: str) -> set[str]:
    """Return the keywords that a sentence recommends, without the keywords of calls inside their values.

    Examples
    --------
    >>> sorted(keywords_of("use mask=masks.Lengths(kv=lengths) or bias="))
    ['bias', 'mask']
    """
    depth, keywords = 0, set()
    for name, bracket in re.findall(r"(?<![\w.])(\w+)=(?!=)|([()\[\]])", sentence):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(bracket, 0)
        if name and not depth:
            keywords.add(name)
    return keywords
