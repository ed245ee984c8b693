import pytest

from amoeba.system.files import model_folder


def test_a_model_that_is_no_folder_here_is_refused_with_how_to_get_one(tmp_path):
    (tmp_path / "a file").touch()
    for name, got in ((tmp_path / "a file", "the file '.*a file'"), (tmp_path / "no", "which is not here"), ("", "''")):
        with pytest.raises(ValueError, match=f"MODEL: expected a folder or a GGUF file; got .*{got}.*hf download"):
            model_folder(name)
    assert model_folder(str(tmp_path)) == model_folder(tmp_path) == tmp_path
