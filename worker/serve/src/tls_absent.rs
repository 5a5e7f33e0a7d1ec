//! Stands for TLS in a program that was built without it.

use std::{io, path::Path, time::Duration};

use crate::error::ServeError;

/// There is none.
#[derive(Clone, Debug)]
pub enum Tls {}

/// A client's stream, in clear.
pub type ClearStream<S> = S;

impl Tls {
    /// Refuses, and says how to build a program that has it.
    pub fn load(_cert: &Path, _key: &Path) -> Result<Self, ServeError> {
        Err(ServeError::WithoutTls)
    }

    pub(crate) fn accept<S>(&self, _stream: S, _patience: Duration) -> io::Result<ClearStream<S>> {
        match *self {}
    }
}

pub(crate) fn close<S>(_stream: &mut ClearStream<S>) {}
