//! A run's place in a bucket as a launch finds it, brings what it has, and takes it.

use std::path::Path;

use coxswain_proto::{checkpoint::MANIFEST, ids::Step, run_spec::RunSpec};
use coxswain_remote::{Storage, storage};
use coxswain_worker::train::checkpoint::Manifest;

use super::{
    bring::{self, RestoreSummary, goes_on_here},
    error::BucketError,
    index::Set,
    local::Record,
    owner::{self, IndexSnapshot, Owner},
};

/// What a run's bucket has of it when it is launched.
pub struct BucketPlace {
    storage: Box<dyn Storage>,
    address: String,
    known: IndexSnapshot,
}

/// What would be brought: a run as it was left elsewhere.
pub struct RemoteRun {
    /// Steps that are done.
    pub step: Step,
    /// The fingerprint of its data set, if that is known.
    pub dataset: Option<String>,
}

impl BucketPlace {
    /// Asks; nothing for a run without a bucket. Addresses and credentials that are wrong fail here.
    pub fn look(spec: &RunSpec) -> Result<Option<Self>, BucketError> {
        let Some(address) = address(spec) else { return Ok(None) };
        Self::look_into(storage(&address)?, address, spec).map(Some)
    }

    /// Asks a bucket that is open already.
    pub fn look_into(
        storage: Box<dyn Storage>,
        address: String,
        spec: &RunSpec,
    ) -> Result<Self, BucketError> {
        let known = owner::look(&*storage, &address, spec)?;
        Ok(Self { storage, address, known })
    }

    /// The run as it was launched last, if it was.
    pub fn launched(&self) -> Option<RunSpec> {
        self.known.version.as_ref().and_then(|_| self.known.index.spec())
    }

    /// What [`BucketPlace::bring`] would bring, if it is this run: asked before anything is written.
    pub fn coming(&self, spec: &RunSpec) -> Result<Option<RemoteRun>, BucketError> {
        self.check(spec)?;
        let (index, output) = (&self.known.index, Path::new(&spec.run.output_dir));
        let newest = index.newest().filter(|newest| !goes_on_here(&self.address, index, newest, output));
        let coming = |newest: &Set| -> Result<RemoteRun, BucketError> {
            let step = Step(newest.step);
            let path = format!("checkpoints/{}/{MANIFEST}", step.checkpoint_dir());
            let kept = newest.files.iter().find(|kept| kept.path == path);
            let manifest = kept.map(|kept| self.storage.get(&kept.object)).transpose()?.flatten();
            // One that is damaged is found out where it is brought.
            let manifest = manifest.and_then(|(bytes, _)| serde_json::from_slice::<Manifest>(&bytes).ok());
            Ok(RemoteRun { step, dataset: manifest.map(|manifest| manifest.dataset_fingerprint) })
        };
        newest.map(coming).transpose()
    }

    /// Refuses a run of so many steps that has come further.
    pub fn check_length(&self, steps: u64) -> Result<(), BucketError> {
        match self.known.index.newest().filter(|newest| newest.step > steps) {
            Some(Set { step, .. }) => {
                Err(BucketError::BeyondItsEnd { address: self.address.clone(), step: *step, steps })
            }
            None => Ok(()),
        }
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
            None => spec.train.steps.map_or(Ok(()), |steps| self.check_length(steps)),
        }
    }

    /// Brings what this machine's disk lacks.
    pub fn bring(&self, spec: &RunSpec) -> Result<Option<RestoreSummary>, BucketError> {
        self.check(spec)?;
        let output = Path::new(&spec.run.output_dir);
        bring::bring(&*self.storage, &self.address, &self.known.index, output)
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
    Owner::claim(storage, address, spec, launcher)
}

/// Where a run is kept, if it is.
pub fn address(spec: &RunSpec) -> Option<String> {
    let address = spec.run.bucket.as_ref()?;
    let trimmed = address.trim_end_matches('/');
    // What names no bucket is refused as it was written.
    Some(if trimmed.contains("://") { trimmed } else { address }.to_owned())
}
