//! Files that appear whole or not at all, and trainables in them.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use safetensors::{Dtype, SafeTensorError, tensor::TensorView};

use crate::{params::TrainableLayout, pulse};

/// Lets `write` make a file beside `path`, brings it to the disk, and renames it into place. Nothing is left
/// behind on failure.
pub fn replace(path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let staged: PathBuf = path.with_file_name(name);
    let result = write(&staged)
        .and_then(|()| {
            let file = File::open(&staged)?;
            pulse::allow(file.metadata()?.len());
            file.sync_all()
        })
        .and_then(|()| fs::rename(&staged, path));
    result.inspect_err(|_| {
        let _ = fs::remove_file(&staged);
    })
}

/// Writes the trainables that `wanted` picks by name as a safetensors file.
pub fn write_tensors(
    path: &Path,
    layout: &TrainableLayout,
    values: &[f32],
    wanted: impl Fn(&str) -> bool,
) -> io::Result<()> {
    let views = layout.params().iter().filter(|param| wanted(&param.name)).map(|param| {
        let values = bytemuck::cast_slice(&values[param.offset..param.offset + param.len()]);
        let view = TensorView::new(Dtype::F32, param.shape.clone(), values);
        (param.name.clone(), view.expect("shape and values come from one layout"))
    });
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    safetensors::serialize_to_file(views, Some(metadata), path).map_err(|error| match error {
        // As the system said it: of a full disk there is something to say.
        SafeTensorError::IoError(source) => source,
        error => io::Error::other(error),
    })
}
