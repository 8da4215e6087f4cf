"""The order in which requests get compute: first come, first served.

`order` gives a request's place once, at arrival. The waiting queue is sorted by it, running requests are scheduled in
it, and the last in it is preempted first. Preemption or a resubmission after a crash does not change it.
"""

from headrace.core.request import Request

Place = tuple[int, int, int]


def order(request: Request, ticket: int) -> Place:
    """Less is earlier. `ticket` counts arrivals here and settles equal arrival times; choices follow each other."""
    return (request.arrival_ns, ticket, request.choice)
