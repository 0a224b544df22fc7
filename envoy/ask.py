"""HTTP client for the verify.sh of each sandbox: one connection per request, the response on one line.

    ask.py [-n TIMES] [-X METHOD] [-H 'name: value']… [-d JSON] [-h NAME | -b] URL

It prints the statuses, with equal neighbours combined: `5x200 1x429`. A connection that is closed without a response is
`closed`. `{n}` in the URL and in headers is the number of the request, from 1. With -h it prints that header of the
last response instead, with -b its body. It needs only the standard library, like any machine that runs the service.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import sys
from urllib.parse import urlsplit

Answer = tuple[str, dict[str, str], str]  # status, headers, body


def ask(method: str, url: str, headers: dict[str, str], body: str | None = None) -> Answer:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        sys.exit(f"{url} is no http:// address")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=10)
    try:
        connection.connect()
    except OSError as error:
        sys.exit(f"no server listens on {parts.netloc}: {error}")
    try:
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (ConnectionError, http.client.RemoteDisconnected):
        return "closed", {}, ""
    finally:
        connection.close()
    return str(answer.status), {name.lower(): value for name, value in answer.getheaders()}, text


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-n", dest="times", type=int, default=1)
    parser.add_argument("-X", dest="method", default="GET")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="data")
    parser.add_argument("-h", dest="show")
    parser.add_argument("-b", dest="body", action="store_true")
    parser.add_argument("url")
    result = parser.parse_args()
    answers: list[Answer] = []
    for number in range(1, result.times + 1):
        pairs = (header.replace("{n}", str(number)).split(":", 1) for header in result.headers)
        headers = {name.strip(): value.strip() for name, value in pairs}
        if result.data is not None:
            headers.setdefault("content-type", "application/json")
        answers.append(ask(result.method, result.url.replace("{n}", str(number)), headers, result.data))
    if result.show is not None:
        print(answers[-1][1].get(result.show.lower(), "none"))
    elif result.body:
        print(answers[-1][2])
    else:
        runs = itertools.groupby(status for status, _, _ in answers)
        print(*(f"{len(list(equal))}x{status}" for status, equal in runs))


if __name__ == "__main__":
    main()
