//! Where a pretrained model lies in the file of a policy that is made of it.

/// Where a model lies in a policy's file: what its names begin with, and how many of its decoder layers are
/// there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileLocation<'w> {
    /// Before the names that Transformers gives its tensors, dot included.
    pub prefix: &'w str,
    /// The first so many; all if none.
    pub layers: Option<usize>,
}
