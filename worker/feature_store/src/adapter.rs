//! The adapter that a namespace was made with, kept beside its records: a miss that comes later must be
//! computed with the same.
//!
//! The file is safetensors, whole or absent. Its content is the digest in the namespace's own description, so
//! a damaged or foreign file is noticed without a checksum of its own.

use std::borrow::Cow;

use safetensors::{Dtype, SafeTensors, View};

use super::{
    digest::{Digest, Hasher},
    error::StoreError,
    namespace::Namespace,
    namespace_file, usage,
};

/// A named matrix of the adapter: borrowed from the trainer, or read from a file.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterTensor<'a> {
    /// Name among the trainables.
    pub name: Cow<'a, str>,
    /// Axes.
    pub shape: Cow<'a, [usize]>,
    /// Values, row-major.
    pub values: Cow<'a, [f32]>,
}

/// The adapter's content as one name, whatever the order of its tensors. Nothing is copied.
pub fn adapter_digest(tensors: &[AdapterTensor<'_>]) -> Digest {
    let mut sorted: Vec<_> = tensors.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    let mut hash = Hasher::new("coxswain vl cache adapter v1");
    for tensor in sorted {
        let shape: Vec<u8> = tensor.shape.iter().flat_map(|n| (*n as u64).to_le_bytes()).collect();
        hash.named(&tensor.name, &shape);
        hash.named("values", &little_endian(&tensor.values));
    }
    hash.finish()
}

impl Namespace {
    /// Keeps the adapter that the namespace's description names. One sound copy is enough, whichever process
    /// wrote it.
    pub fn save_adapter(&self, tensors: &[AdapterTensor<'_>]) -> Result<(), StoreError> {
        let path = self.dir().join(NAME);
        let (found, expected) = (adapter_digest(tensors), self.description().ingredients.adapter);
        if expected != Some(found) {
            let expected = expected.map_or("none".into(), |digest| digest.to_string());
            let detail = format!("the adapter has digest {found}, but this namespace expects {expected}");
            return Err(StoreError::Foreign { path, detail });
        }
        // One that is damaged is of no use.
        if matches!(self.load_adapter(), Ok(Some(_))) {
            return Ok(());
        }
        let views = tensors.iter().map(|tensor| (&*tensor.name, Matrix(tensor)));
        let bytes = safetensors::serialize(views, None).map_err(|error| StoreError::Foreign {
            path: path.clone(),
            detail: format!("cannot be written as safetensors: {error}"),
        })?;
        namespace_file::sync(self.dir())?;
        usage::write_whole(&path, &bytes)
    }

    /// The adapter that the namespace was made with; none if it was not kept.
    pub fn load_adapter(&self) -> Result<Option<Vec<AdapterTensor<'static>>>, StoreError> {
        let path = self.dir().join(NAME);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(StoreError::io("read", &path)(error)),
        };
        let foreign = |detail: String| StoreError::Foreign { path: path.clone(), detail };
        let file = SafeTensors::deserialize(&bytes)
            .map_err(|error| foreign(format!("is not safetensors ({error}); remove it")))?;
        let tensors: Vec<_> = file
            .iter()
            .map(|(name, view)| {
                let values: Vec<_> =
                    view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                let (name, shape) = (name.to_owned().into(), view.shape().to_vec().into());
                AdapterTensor { name, shape, values: values.into() }
            })
            .collect();
        let (found, expected) = (adapter_digest(&tensors), self.description().ingredients.adapter);
        match expected == Some(found) {
            true => Ok(Some(tensors)),
            false => {
                Err(foreign(format!("is not this namespace's adapter (its digest is {found}); remove it")))
            }
        }
    }
}

struct Matrix<'a>(&'a AdapterTensor<'a>);

impl View for Matrix<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }
    fn shape(&self) -> &[usize] {
        &self.0.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        little_endian(&self.0.values)
    }
    fn data_len(&self) -> usize {
        self.0.values.len() * 4
    }
}

fn little_endian(values: &[f32]) -> Cow<'_, [u8]> {
    match cfg!(target_endian = "little") {
        true => Cow::Borrowed(bytemuck::cast_slice(values)),
        false => Cow::Owned(values.iter().flat_map(|x| x.to_le_bytes()).collect()),
    }
}

const NAME: &str = "adapter.safetensors";
