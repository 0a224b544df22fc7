"""Headers, bodies and metadata of responses, the same for every API.

options           settings of the operator
status_selection  selects the limit that a response reports, and the limits that deny a call
formatting        names of limits and windows, timestamps
limit_labels      cached names of the limits of one plan template
response_context  inputs of one response
ratelimit_fields  RateLimit and RateLimit-Policy as Structured Fields
headers           one function per family of headers
bodies            bodies of denied calls
rule_metadata     the reported rule as dynamic metadata
dynamic_metadata  descriptions of requests, and metadata of rules
builder           `ResponseBuilder`, which combines them
"""

from ratelimit_rls.api.responses.builder import ResponseBuilder, ResponseParts
from ratelimit_rls.api.responses.options import ResponseOptions

__all__ = ["ResponseBuilder", "ResponseOptions", "ResponseParts"]
