"""Teachers and student are scored side by side, and reported."""

from pathlib import Path

from helpers import table_rows

from vanilla_transformer.commands.distill import find_systems
from vanilla_transformer.students.scoring import table
from vanilla_transformer.students.translating import Teacher


def test_a_table_shows_texts_as_they_are():
    made = table(["source", "number"], [("<b>a</b> | b\nc & d", "1"), ("x" * 200, "22")])
    assert "| &lt;b&gt;a&lt;/b&gt; \\| b c &amp; d " in made
    assert table_rows(made)[-1] == ["x" * 100, "22"]


def test_teachers_of_any_name_have_rows_of_their_own():
    teachers = [Teacher([name]) for name in ("student", "a", "a")]
    names = ["student (teacher 1)", "a", "a (teacher 3)", "student"]
    assert [*find_systems(Path("out"), teachers, [])] == names
