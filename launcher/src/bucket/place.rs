//! A run's place in a bucket as a launch finds it, brings what it has, and takes it.

use std::path::Path;

use coxswain_proto::run_spec::RunSpec;
use coxswain_remote::storage;

use super::{
    bring::{self, Brought},
    error::BucketError,
    index::Set,
    local::Record,
    owner::{self, Known, Owner},
};

/// What a run's bucket has of it when it is launched.
pub struct BucketPlace {
    address: String,
    known: Known,
}

impl BucketPlace {
    /// Asks; nothing for a run without a bucket. Addresses and credentials that are wrong fail here.
    pub fn look(spec: &RunSpec) -> Result<Option<Self>, BucketError> {
        let Some(address) = address(spec) else { return Ok(None) };
        let known = owner::look(&*storage(&address)?, &address, spec)?;
        Ok(Some(Self { address, known }))
    }

    /// The run as it was launched last, if it was.
    pub fn launched(&self) -> Option<RunSpec> {
        self.known.version.as_ref().and_then(|_| self.known.index.spec())
    }

    /// Whether it is this run that lies there, and is to go on.
    pub fn check(&self, spec: &RunSpec) -> Result<(), BucketError> {
        let address = || self.address.clone();
        let index = &self.known.index;
        if self.known.version.is_none() {
            return Ok(());
        }
        index.must_be_of(spec).map_err(|foreign| BucketError::Foreign { address: address(), foreign })?;
        match index.newest().filter(|_| !spec.train.resume) {
            Some(set) => Err(BucketError::Anew { address: address(), step: set.step }),
            None => Ok(()),
        }
    }

    /// Brings what this machine's disk lacks.
    pub fn bring(&self, spec: &RunSpec) -> Result<Option<Brought>, BucketError> {
        self.check(spec)?;
        let output = Path::new(&spec.run.output_dir);
        bring::bring(&*storage(&self.address)?, &self.address, &self.known.index, output)
    }
}

/// Takes a run for the launch of this launcher. Fails where its bucket cannot be written.
pub fn take(spec: &RunSpec, address: &str, launcher: &str) -> Result<Owner, BucketError> {
    let (output, storage) = (Path::new(&spec.run.output_dir), storage(address)?);
    let before = owner::look(&*storage, address, spec)?.index;
    let newest = before.newest();
    let record = Record {
        address: address.to_owned(),
        launcher: launcher.to_owned(),
        before: before.launcher.clone(),
        step: newest.map(|set| set.step),
        bytes: newest.map_or(0, Set::bytes),
    };
    record.write(output)?;
    Owner::take(storage, address, spec, launcher)
}

/// Where a run is kept, if it is.
pub fn address(spec: &RunSpec) -> Option<String> {
    let address = spec.run.bucket.as_ref()?;
    let trimmed = address.trim_end_matches('/');
    // What names no bucket is refused as it was written.
    Some(if trimmed.contains("://") { trimmed } else { address }.to_owned())
}
