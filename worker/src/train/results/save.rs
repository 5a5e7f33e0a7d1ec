//! Checkpoints written and read by all ranks together. The directory itself is
//! [`checkpoint`](super::checkpoint)'s.
//!
//! Writing is a small transaction of its own: rank 0 makes the staging directory, every rank writes its part
//! and says how that went, and only if all are well does rank 0 publish. A full disk or an out-of-memory on
//! one rank costs the checkpoint, not the run, and leaves nothing behind.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
};

use coxswain_proto::{
    VERSION, checkpoint, document,
    ids::{Bytes, Step},
    run_spec::RunSpec,
};
use safetensors::Dtype;

use super::{
    best::Best,
    checkpoint::{Checkpoint, CheckpointError, Manifest, Staging, TRAINABLES, io_error},
};
use crate::train::{Features, LossHistory, Mark, TrainError, Workbench, verify};
use crate::{
    collective::{BufMut, Reduce},
    link::{CheckpointNews, Phase, Report},
    memory::{self, OutOfMemory},
    zero::{ReplicatedOptimizer, StateError, are_sound_weights, read_average},
};
use coxswain_nn::{
    files::write_tensors,
    kernels::{Tape, flat::Flat},
    params::TrainableLayout,
    pulse,
    tensor_file::{OpenFile, ReadAt, TensorFile},
};

fn optimizer_file(rank: u32, world: usize) -> String {
    format!("optimizer-rank{rank:04}-of-{world:04}.safetensors")
}

/// What this run has left so far.
#[derive(Debug, Default)]
pub(in crate::train) struct Results {
    /// The step of its newest checkpoint.
    pub saved: Option<Step>,
}

impl Results {
    /// Writes the checkpoint of the steps done so far, unless it is there.
    pub fn save_once<B: Tape<Base = B>>(&mut self, bench: &mut Workbench<'_, B>) -> Result<(), TrainError> {
        if self.saved == Some(bench.next) { Ok(()) } else { self.save(bench) }
    }

    /// Writes the checkpoint of the steps done so far. What the file system refuses is reported and survived.
    pub fn save<B: Tape<Base = B>>(&mut self, bench: &mut Workbench<'_, B>) -> Result<(), TrainError> {
        let step = bench.next;
        verify::compare(step, &bench.run, &mut bench.members, &mut bench.learner, &mut bench.stats.meter)?;
        bench.with_features(|features, desk| features.publish_all(desk))?;
        bench.enter(Phase::Checkpoint, step)?;
        let mark = bench.features.as_ref().and_then(Features::mark);
        let mut saver = Saver { bench, step, mark };
        match saver.write_together()? {
            Ok(bytes) => {
                self.saved = Some(step);
                saver.tell(bytes, CheckpointNews::Complete)
            }
            Err(CheckpointError::Unsound { .. }) => {
                let found = bench.unsound();
                Err(bench.diverged(found)?)
            }
            Err(error) => {
                tracing::error!(step = step.0, %error, "checkpoint not written; training continues");
                saver.tell(Bytes(0), CheckpointNews::Failed(error.to_string()))
            }
        }
    }

    /// The first rank: the newest checkpoint on disk. The coordinator is told of those that it does not know,
    /// because the process that published them was killed before it could say so.
    pub fn tell_unknown<B: Tape<Base = B>>(
        &self,
        bench: &mut Workbench<'_, B>,
    ) -> Result<Option<Step>, TrainError> {
        if bench.members.rank().0 > 0 || !bench.members.link.has_generations() {
            return Ok(None);
        }
        let known = bench.members.assignment.checkpoint_step;
        // One that cannot be read says so when it is to be gone on from.
        let complete = bench.run.store.complete().unwrap_or_default();
        for found in complete.iter().filter(|found| Step(found.manifest.step) > known) {
            let saver = Saver { bench, step: Step(found.manifest.step), mark: None };
            saver.tell(Bytes(found.bytes()), CheckpointNews::Complete)?;
        }
        Ok(complete.last().map(|found| Step(found.manifest.step)))
    }

    /// Takes over the checkpoint of a step, written by any number of ranks; returns the bytes read.
    pub fn restore<B: Tape<Base = B>>(
        &mut self,
        bench: &mut Workbench<'_, B>,
        step: Step,
    ) -> Result<Bytes, TrainError> {
        bench.enter(Phase::Checkpoint, step)?;
        let found = bench.run.store.checkpoint(step.0)?;
        check_origin(&found, bench.run.spec, &bench.feed.samples.fingerprint().to_string())?;
        let mut weights = read_trainables(&found, bench.learner.trainables.layout())?;
        // Constants are there since the model was built.
        weights.truncate(bench.learner.trainables.layout().len());
        weights.shrink_to_fit();
        // What this rank holds of an earlier generation stays until the new state is whole. A process that
        // has just started holds nothing: its first weights go before room is made for the moments.
        let mut weights = Some(weights);
        if bench.learner.held.is_none() {
            weights.take().into_iter().for_each(|weights| bench.learner.trainables.set(weights));
        }
        let empty = bench.learner.empty_optimizer(bench.run.spec, &bench.members);
        let (optimizer, begins) = match &weights {
            Some(weights) => read_optimizer(empty, &found, weights)?,
            None => bench.learner.trainables.lend(|_, weights| read_optimizer(empty, &found, weights))?,
        };
        if begins {
            let line = format!(
                "optimizer.ema_decay: the checkpoint of step {step} has no average of the weights: the \
                 average starts from the current weights"
            );
            bench.run.starts.push(line);
        }
        weights.into_iter().for_each(|weights| bench.learner.trainables.set(weights));
        bench.learner.hold(optimizer, &bench.members);
        bench.next = step;
        bench.skips.newest.clone_from(&found.manifest.skipped);
        bench.skips.losses = LossHistory(found.manifest.losses.clone());
        bench.feed.searched = bench.run.spec.train.auto_micro_batch;
        bench.feed.micro_batch = match bench.run.spec.train.auto_micro_batch {
            true => found.manifest.micro_batch,
            false => bench.run.spec.train.micro_batch.min(found.manifest.micro_batch),
        };
        self.saved = Some(step);
        bench.stats.planned_before = found.manifest.planned_steps;
        bench.with_features(|features, desk| features.resume(desk, found.manifest.cache))?;
        Ok(Bytes(found.bytes()))
    }
}

/// Writes one checkpoint, together with the savers of all other ranks.
struct Saver<'s, 'a, B: Tape<Base = B>> {
    bench: &'s mut Workbench<'a, B>,
    /// Steps done.
    step: Step,
    /// What the checkpoint says of kept features.
    mark: Option<Mark>,
}

impl<B: Tape<Base = B>> Saver<'_, '_, B> {
    fn tell(self, bytes: Bytes, news: CheckpointNews) -> Result<(), TrainError> {
        let path = format!("checkpoints/{}", self.step.checkpoint_dir());
        // Completion is the publisher's to tell; a failure is told by every rank that saw it.
        if self.bench.members.rank().0 == 0 || matches!(news, CheckpointNews::Failed(_)) {
            self.bench.members.link.report(Report::Checkpoint { step: self.step, path, bytes, news })?;
        }
        Ok(())
    }

    /// All ranks: stage, write, agree, publish. The outer error ends training; the inner one only this
    /// checkpoint.
    fn write_together(&mut self) -> Result<Result<Bytes, CheckpointError>, TrainError> {
        let step = self.step.0;
        let first = self.bench.members.rank().0 == 0;
        let staged =
            if first { self.bench.run.store.stage(step) } else { Ok(self.bench.run.store.staging(step)) };
        let staging = match self.agree(staged)? {
            Ok(staging) => staging,
            Err(error) => return Ok(Err(error)),
        };
        let written = self.write_guarded(&staging);
        let bytes = match self.agree(written)? {
            Ok(bytes) => bytes,
            Err(error) => {
                if first {
                    staging.abandon();
                }
                return Ok(Err(error));
            }
        };
        let published = if first { self.publish(&staging) } else { Ok(bytes) };
        self.agree(published)
    }

    /// Whether every rank got through: its own error where there is one, another rank's otherwise. What is
    /// not sound on one rank is no checkpoint of any.
    fn agree<V>(
        &mut self,
        own: Result<V, CheckpointError>,
    ) -> Result<Result<V, CheckpointError>, TrainError> {
        let (step, unsound) = (self.step.0, matches!(own, Err(CheckpointError::Unsound { .. })));
        let mut failed = [own.is_err(), unsound].map(|it| f64::from(u8::from(it)));
        self.bench.members.comm.all_reduce(BufMut::F64(&mut failed), Reduce::Max)?;
        Ok(match own {
            _ if failed[1] > 0.0 => Err(CheckpointError::Unsound { step }),
            Ok(_) if failed[0] > 0.0 => Err(CheckpointError::OtherRank { step }),
            own => own,
        })
    }

    /// [`write_parts`](Self::write_parts), as far as memory goes.
    fn write_guarded(&mut self, staging: &Staging) -> Result<Bytes, CheckpointError> {
        let before = self.bench.stats.meter.in_use();
        memory::guarded_again(|| self.write_parts(staging)).unwrap_or_else(|overrun| {
            let found = self.bench.stats.meter.out_of_memory(Phase::Checkpoint, overrun.in_use, before.0);
            let source = Box::new(OutOfMemory { device: overrun.device, ..found });
            Err(CheckpointError::DoesNotFit { step: self.step.0, source })
        })
    }

    /// This rank's files; returns their bytes. Values are looked at as they are written.
    fn write_parts(&mut self, staging: &Staging) -> Result<Bytes, CheckpointError> {
        let (step, name) =
            (self.step.0, optimizer_file(self.bench.members.rank().0, self.bench.members.comm.world()));
        let path = staging.file(&name);
        let refused = |path: &Path, source: io::Error| match source.kind() {
            io::ErrorKind::InvalidData => CheckpointError::Unsound { step },
            _ => io_error("write", path)(source),
        };
        let optimizer = self.bench.learner.optimizer();
        pulse::allow(self.bench.learner.checkpoint_bytes().0);
        File::create(&path)
            .map(|file| BufWriter::with_capacity(1 << 20, file))
            .and_then(|mut file| optimizer.write_to(&mut file).and_then(|_| file.flush()))
            .map_err(|source| refused(&path, source))?;
        let mut bytes = staging.sync(&name)?;
        if self.bench.members.rank().0 == 0 {
            let path = staging.file(TRAINABLES);
            pulse::allow(self.bench.learner.checkpoint_bytes().0);
            self.bench
                .learner
                .trainables
                .lend_whole(|layout, values| match are_sound_weights(values) {
                    true => write_tensors(&path, layout, values, |_| true),
                    false => Err(io::ErrorKind::InvalidData.into()),
                })
                .map_err(|source| refused(&path, source))?;
            bytes += staging.sync(TRAINABLES)?;
        }
        Ok(Bytes(bytes))
    }

    fn publish(&mut self, staging: &Staging) -> Result<Bytes, CheckpointError> {
        let manifest = Manifest {
            format: checkpoint::FORMAT,
            step: self.step.0,
            epoch: self.bench.run.plan.epoch(self.step),
            world_size: self.bench.members.comm.world(),
            spec_digest: self.bench.run.spec_digest.clone(),
            core_digest: Some(document::core_digest(self.bench.run.spec)),
            planned_steps: Some(self.bench.run.plan.total_steps()),
            version: VERSION.to_owned(),
            dataset_fingerprint: self.bench.feed.samples.fingerprint().to_string(),
            micro_batch: self.bench.feed.micro_batch,
            cache: self.mark,
            cache_phase: self.bench.members.link.decided(self.step),
            skipped: self.bench.skips.newest.clone(),
            losses: self.bench.skips.losses.0.clone(),
            files: Default::default(),
        };
        let world = self.bench.members.comm.world();
        let mut wanted: Vec<_> = (0..world as u32).map(|rank| optimizer_file(rank, world)).collect();
        wanted.push(TRAINABLES.to_owned());
        let found = staging.publish(manifest, &wanted)?;
        let best = Best::load(&self.bench.run.output_dir).map(|best| best.step);
        self.bench.run.store.prune(self.bench.run.spec.train.keep_checkpoints, best);
        Ok(Bytes(found.bytes()))
    }
}

/// This optimizer with its moments from the files that have some of this rank's parts, read into their
/// places. And whether an average begins with these weights.
fn read_optimizer<F: Flat>(
    mut optimizer: ReplicatedOptimizer<F>,
    found: &Checkpoint,
    weights: &[f32],
) -> Result<(ReplicatedOptimizer<F>, bool), CheckpointError> {
    let world = found.manifest.world_size;
    let wanted = |rank: &usize| optimizer.keeps_of(&optimizer.part_in(world, *rank));
    let open = |chosen: &dyn Fn(&usize) -> bool| -> Result<Vec<OpenFile>, CheckpointError> {
        let file = |rank: usize| match chosen(&rank) {
            true => open(found, &optimizer_file(rank as u32, world)),
            false => Ok(OpenFile::default()),
        };
        (0..world).map(file).collect()
    };
    let files = open(&wanted)?;
    let imported = match optimizer.import(&files, weights) {
        // Written with the parameters in another order: their parts lie in other files.
        Err(StateError::Coverage { .. } | StateError::Unreadable { .. })
            if files.iter().any(|file| file.size() == 0) =>
        {
            optimizer.import(&open(&|_| true)?, weights)
        }
        imported => imported,
    };
    let begins = imported.map_err(|error| unusable(found, &error))?;
    Ok((optimizer, begins))
}

/// The average of the weights that a checkpoint has, by name.
pub(in crate::train) fn read_average_of(
    found: &Checkpoint,
    layout: &TrainableLayout,
) -> Result<Vec<f32>, CheckpointError> {
    let world = found.manifest.world_size;
    let files = (0..world).map(|rank| open(found, &optimizer_file(rank as u32, world)));
    let files: Vec<_> = files.collect::<Result<_, _>>()?;
    let average = read_average(&files, layout).map_err(|error| unusable(found, &error))?;
    average.ok_or_else(|| CheckpointError::Foreign {
        path: found.path.clone(),
        detail: "has no average of the weights; its run was trained without `optimizer.ema_decay`".into(),
    })
}

/// A checkpoint of another run or another data set would train on, and mean nothing.
fn check_origin(found: &Checkpoint, spec: &RunSpec, fingerprint: &str) -> Result<(), CheckpointError> {
    let foreign = |detail: String| CheckpointError::Foreign { path: found.path.clone(), detail };
    let manifest = &found.manifest;
    let is_ours = manifest.spec_digest == document::digest(spec)
        || manifest.core_digest == Some(document::core_digest(spec));
    if !is_ours {
        return Err(foreign(
            "was written by a run with other settings; choose another run.output_dir, or restore the settings".into(),
        ));
    }
    if manifest.dataset_fingerprint != fingerprint {
        return Err(foreign(format!(
            "belongs to a data set with fingerprint {}, but data.path has {fingerprint}: restore the data, or choose another run.output_dir",
            manifest.dataset_fingerprint
        )));
    }
    Ok(())
}

/// An optimizer's state that cannot be taken over, by the file that has it.
fn unusable(found: &Checkpoint, error: &StateError) -> CheckpointError {
    let file = |rank| found.path.join(optimizer_file(rank as u32, found.manifest.world_size));
    let path = error.file().map_or(found.path.clone(), file);
    let remedy = format!(
        "restore it from a copy, or remove {} to resume from an older checkpoint if there is one",
        found.path.display()
    );
    CheckpointError::Foreign { path, detail: format!("{error}; {remedy}") }
}

/// Opens a file of a checkpoint that is what was written, with time to read it.
fn open(found: &Checkpoint, name: &str) -> Result<OpenFile, CheckpointError> {
    let path = found.verified(name)?;
    let file = OpenFile::open(&path).map_err(io_error("read", &path))?;
    pulse::allow(file.size());
    Ok(file)
}

/// Reads the flat values of a checkpoint back, constants behind them, by name, each into its place.
pub(in crate::train) fn read_trainables(
    found: &Checkpoint,
    layout: &TrainableLayout,
) -> Result<Vec<f32>, CheckpointError> {
    let path = found.path.join(TRAINABLES);
    let damaged = |detail: String| CheckpointError::Damaged { path: path.clone(), detail };
    let tensors = TensorFile::new(open(found, TRAINABLES)?).map_err(|error| damaged(error.to_string()))?;
    // The file is what was written, as its checksum says: another layout is asked for.
    let foreign = |detail: String| CheckpointError::Foreign {
        path: path.clone(),
        detail: format!("{detail}; restore the settings that this checkpoint was trained with"),
    };
    let mut flat = vec![0.0; layout.whole_len()];
    for param in layout.whole() {
        let tensor = tensors.metadata().info(&param.name).ok_or_else(|| {
            foreign(format!("{} is missing: lora.targets or model.train differ", param.name))
        })?;
        if tensor.dtype != Dtype::F32 || tensor.shape != param.shape {
            return Err(foreign(format!(
                "{} is {:?} {:?}, expected F32 {:?}",
                param.name, tensor.dtype, tensor.shape, param.shape
            )));
        }
        let target = bytemuck::cast_slice_mut(&mut flat[param.offset..param.offset + param.len()]);
        tensors.read(tensor, 0, target).map_err(io_error("read", &path))?;
    }
    if !are_sound_weights(&flat) {
        return Err(damaged(
            "it holds weights that are not finite, or beyond 1.8e19: its run has diverged".into(),
        ));
    }
    let (expected, there) = (layout.whole().count(), tensors.tensors().count());
    if there != expected {
        return Err(foreign(format!("it has {there} tensors, but this run has {expected}")));
    }
    Ok(flat)
}
