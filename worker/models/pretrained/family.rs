//! Families by the `model_type` of their models' `config.json`.

use std::{fmt, path::Path};

use super::{config_file::model_type, error::ModelError};

/// What is found by the name of its models.
pub trait ModelTypes: Send + Sync {
    /// Values of `model_type` in the `config.json` of its models.
    fn model_types(&self) -> &'static [&'static str];
}

/// Families that a program reads, of one kind and on one kind of device.
pub struct Families<F: ?Sized + 'static>(pub &'static [&'static F]);

impl<F: ?Sized> Clone for Families<F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: ?Sized> Copy for Families<F> {}

impl<F: ModelTypes + ?Sized> fmt::Debug for Families<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.model_types()).finish()
    }
}

impl<F: ModelTypes + ?Sized> Families<F> {
    /// The family of the model in `dir`; an error that names those there are, if it is of another.
    pub fn of(self, dir: &Path) -> Result<&'static F, ModelError> {
        let (path, found) = model_type(dir)?;
        self.named(&found).ok_or_else(|| {
            let known: Vec<_> = self.model_types().collect();
            let problem = format!("\"{found}\"; supported are {}", known.join(", "));
            ModelError::Config { path, field: "model_type".into(), problem }
        })
    }

    /// The family of the model in `dir`, if it is one of these, or why what is there is no model.
    pub fn find(self, dir: &Path) -> Option<Result<&'static F, ModelError>> {
        match model_type(dir) {
            Ok((_, name)) => self.named(&name).map(Ok),
            Err(error) => Some(Err(error)),
        }
    }

    /// Every `model_type` that is read.
    pub fn model_types(self) -> impl Iterator<Item = &'static str> {
        self.0.iter().flat_map(|family| family.model_types().iter().copied())
    }

    fn named(self, model_type: &str) -> Option<&'static F> {
        self.0.iter().copied().find(|family| family.model_types().contains(&model_type))
    }
}
