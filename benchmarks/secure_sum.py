"""Measure how long the steps of a secure sum take, without messages; the numbers of docs/federated.md.

    python benchmarks/secure_sum.py

With a roster, ``agree_seconds`` is one client's time to sign the lists, check all signatures and unmask.
The vectors are zero: the time goes into the key streams, one for each peer and one of the client itself.
"""

from __future__ import annotations

import json
import time

import numpy as np
from common import options, say, write

from lit_dpret.federated.keys import new_identity
from lit_dpret.federated.secure_sum import Client, Server, Session


def main() -> None:
    parser = options(__doc__, "secure_sum.json", clients=10)
    parser.add_argument("--words", type=int, default=6_600_000, help="weights of the model")
    arguments = parser.parse_args()
    session = Session(name="benchmark", clients=tuple(range(1, arguments.clients + 1)))
    pairs = {number: new_identity() for number in session.clients}
    roster = {number: public for number, (_, public) in pairs.items()}
    clients = {number: Client(session, number, identity=pairs[number][0], roster=roster) for number in pairs}
    server = Server(session)
    server.keys = {number: client.advertise() for number, client in clients.items()}
    began = time.perf_counter()
    routed = server.route({number: client.share(server.keys.values()) for number, client in clients.items()})
    shared = (time.perf_counter() - began) / len(clients)
    words, masking = np.zeros(arguments.words, dtype=np.uint32), []
    for number in session.clients[1:]:  # the first client is lost
        began = time.perf_counter()
        server.masked[number] = clients[number].mask(words, routed[number])
        masking.append(time.perf_counter() - began)
    began = time.perf_counter()
    lists = (server.active, server.dead)
    signatures = {number: clients[number].sign(*lists) for number in server.active}
    answers = [clients[number].unmask(*lists, signatures) for number in server.active]
    agreed = (time.perf_counter() - began) / len(answers)
    began = time.perf_counter()
    wrong = int(np.count_nonzero(server.total(answers)))
    total = time.perf_counter() - began
    if wrong:
        raise SystemExit(f"{wrong} words of a sum of zeros are not zero.")
    mask = round(float(np.median(masking)), 3)
    facts = {"clients": arguments.clients, "words": arguments.words, "share_seconds": round(shared, 4),
             "mask_seconds": mask, "agree_seconds": round(agreed, 4),
             "unmask_one_lost_seconds": round(total, 3)}  # fmt: skip
    write(facts, arguments.out)
    say(json.dumps(facts))


if __name__ == "__main__":
    main()
