"""An ONNX graph as text or as one HTML page to search."""

import onnx
from jinja2 import Environment

_PAGE = Environment(autoescape=True).from_string("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif }
body { margin: 1.5rem; max-width: 90rem }
input { font: inherit; padding: .4rem .6rem; width: min(30rem, 100%) }
table { border-collapse: collapse; width: 100%; margin-top: 1rem }
td, th { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #8884; vertical-align: top }
td { font-family: ui-monospace, monospace; font-size: 12px; overflow-wrap: anywhere }
td:first-child { text-align: right; color: #888 } .op { font-weight: 600; white-space: nowrap }
</style>
<h1>{{ title }}</h1>
<p>{{ nodes | length }} nodes. {% for name, count in histogram %}{{ name }} × {{ count }}{{ ", " if not loop.last }}{% endfor %}.</p>
<input id="q" placeholder="filter by operation or tensor name" aria-label="filter">
<table><thead><tr><th>#</th><th>operation</th><th>inputs</th><th>outputs</th><th>attributes</th></tr></thead><tbody>
{% for n in nodes %}<tr><td>{{ loop.index }}</td><td class="op">{{ n.op }}</td><td>{{ n.inputs }}</td><td>{{ n.outputs }}</td><td>{{ n.attributes }}</td></tr>
{% endfor %}</tbody></table>
<script>
const q = document.getElementById("q"), rows = [...document.querySelectorAll("tbody tr")];
q.oninput = () => { const s = q.value.toLowerCase(); rows.forEach(r => r.hidden = !r.textContent.toLowerCase().includes(s)) };
</script></html>
""")


def _attributes(node: onnx.NodeProto) -> str:
    return ", ".join(
        f"{a.name}={onnx.helper.get_attribute_value(a)!r}"
        for a in node.attribute
        if a.type != onnx.AttributeProto.TENSOR
    )


def graph_text(model: onnx.ModelProto) -> str:
    """One line a node: outputs = Operation(inputs) {attributes}."""
    lines = [
        f"{', '.join(node.output)} = {node.op_type}({', '.join(node.input)}) {{{_attributes(node)}}}"
        for node in model.graph.node
    ]
    return "\n".join(lines) + "\n"


def graph_html(model: onnx.ModelProto, title: str) -> str:
    """A self-contained page: every node in order, with a filter."""
    from collections import Counter

    nodes = [
        {
            "op": n.op_type,
            "inputs": ", ".join(n.input),
            "outputs": ", ".join(n.output),
            "attributes": _attributes(n),
        }
        for n in model.graph.node
    ]
    return _PAGE.render(title=title, nodes=nodes, histogram=Counter(n["op"] for n in nodes).most_common())
