"""A Decision in words: the headers and the body of an answer, the same through every door.

options     what the operator's settings choose
subject     which of a call's limits is spoken of, and which are to blame for a refusal
words       what limits, windows and moments are called
vocabulary  the same, worked out once for calls of one kind
telling     one answer in the making
structured  RateLimit and RateLimit-Policy, which have a grammar of their own
headers     one function per family of headers
bodies      what a refusal says besides
fired       which rule it was, as dynamic metadata
tell        all of it together: `Answers`
"""

from ratelimit_rls.transport.answers.options import AnswerOptions
from ratelimit_rls.transport.answers.tell import Answers, Told

__all__ = ["AnswerOptions", "Answers", "Told"]
