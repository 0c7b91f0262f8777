"""A small agent without a model: it loops, and it pays. `guardd run -- python examples/refund_agent.py`"""

from guardd_client import Guard, Refused, RunStopped

guard = Guard()
run = guard.run(agent="support")
paid = []


@run.tool(key=["order"])
def refund(order: str, cents: int) -> dict:
    paid.append(order)
    return {"refunded": order}


@run.tool()
def search(query: str) -> list:
    return ["one hit"]


print("refund  ", refund("A-17", 4200))
print("again   ", refund("A-17", 4200), f"- paid {len(paid)} time")
for _ in range(9):
    try:
        search("how to refund order A-17")
    except RunStopped as stopped:
        print("stopped ", stopped.envelope["reason"], "->", stopped.envelope["next_action"])
        break
    except Refused as refused:
        print("refused ", refused.hint)
