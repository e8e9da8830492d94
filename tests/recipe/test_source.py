import pytest

from camshaft.errors import RecipeError
from camshaft.recipe.source import parse
from camshaft.recipe.writing import to_yaml


def data(text):
    return parse(text, "r.yaml").data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1e3", 1000.0), ("1_000", 1000), ("-5", -5),
        ("+5", 5), ("0", 0), ("0.5", 0.5), (".5", 0.5), ("5.", 5.0),
        ("0x10", 16), ("0o17", 15), ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("on", "on"), ("yes", "yes"), ("no", "no"), ("off", "off"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"),
        ("'1e-3'", "1e-3"), ('"true"', "true"), ("1.2.3", "1.2.3"), (".inf", float("inf")), ("e3", "e3"), ("1e", "1e"),
    ],
)  # fmt: skip
def test_a_scalar_is_read_as_yaml_1_2_reads_it(text, value):
    read = data(f"a: {text}")["a"]
    assert read == value
    assert type(read) is type(value)


def test_a_leading_zero_is_refused_because_yamls_differ():
    with pytest.raises(RecipeError) as caught:
        data("a: 1\nb: 010")
    assert str(caught.value) == (
        "r.yaml:2: 010 starts with 0: one YAML reads it as octal, another as decimal.\n"
        "  Write 10, or quote it if it is text."
    )


def test_a_duplicate_key_names_both_lines():
    with pytest.raises(RecipeError) as caught:
        data("a: 1\nb: 2\na: 3")
    assert str(caught.value) == (
        "r.yaml:3: the key 'a' is given twice; the first is on line 1.\n"
        "  YAML would silently keep one of them. Remove one."
    )


def test_a_tab_is_named_with_its_line():
    with pytest.raises(RecipeError, match=r"^r.yaml:2: this is not YAML: .*\n  Indent with spaces, not tabs.$"):
        data("a:\n\tb: 1")


def test_every_value_knows_its_line():
    document = parse("a:\n  b: 1\n  c:\n    - x\n    - y\n", "r.yaml")
    assert document.lines[("a", "b")] == 2
    assert document.lines[("a", "c", 1)] == 5


def test_aliases_and_merge_keys_copy_values():
    text = "x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: *x\n"
    assert data(text)["y"] == {"b": 3, "a": 1}
    assert data(text)["z"] == {"a": 1, "b": 2}


def test_a_merge_key_takes_several_mappings_and_the_first_wins():
    assert data("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b]}")["c"] == {"x": 1, "y": 2}


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    from camshaft.recipe.source import read_file

    (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_file(tmp_path / "r.yaml", "r.yaml").data == {"a": 1}


def test_an_empty_file_holds_nothing():
    assert data("") is None
    assert data("# only a remark\n") is None


@pytest.mark.parametrize(
    "text", ["1e3", "010", "08", "0o17", "on", "1:30", "null", "~", "", "1_0", ".5", "=", "<<", "a: b", "é", "- x"]
)
def test_text_that_looks_like_something_else_is_written_so_that_it_stays_text(text):
    assert parse(to_yaml({"a": text, text: [text]}), "r.yaml").data == {"a": text, text: [text]}
