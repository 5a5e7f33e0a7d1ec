//! What a user takes away from a run, written by rank 0 once training is over.
//!
//! ```text
//! ..                    the task's artifacts: adapters, weights, statistics
//! run_spec.json         the run
//! summary.json          losses, held-out error, speed, memory of every rank
//! samples.json          a few held-out samples beside what is predicted of them
//! manifest.json         what each file is, with checksums; written last
//! ema/..                the artifacts of the weights' average, where one is kept (`average`)
//! ```
//!
//! Every file appears by rename, so a crash leaves the previous export or the new one, file by file.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use coxswain_proto::{
    VERSION,
    ids::{Rank, Step},
    run_spec::RunSpec,
};
use serde::Serialize;

use super::checkpoint::{FileEntry, SPEC_FILE};
use coxswain_nn::{files::replace, kernels::Tape, pulse};
use coxswain_task::{Artifact, Example, Samples, TextFile};

use crate::train::{
    Facts, Learner, RankPeak, SCOPES, SUMMARY_FILE, Summary, TrainError, Workbench, examples,
};
use crate::{
    collective::{Buf, BufMut},
    link::{Phase, Report},
    memory::{self, Meter, OutOfMemory},
};

/// Held-out samples beside what is predicted of them.
const SAMPLES_FILE: &str = "samples.json";

/// `manifest.json`: what each exported file is.
#[derive(Debug, Serialize)]
pub(in crate::train) struct ExportManifest<'a> {
    pub version: &'a str,
    pub run: &'a str,
    pub spec_digest: &'a str,
    pub base_model: &'a str,
    pub steps: u64,
    /// Filled in as it is written.
    pub files: Vec<ManifestFile>,
}

/// `samples.json`.
#[derive(Debug, Serialize)]
struct SampleFile<'a> {
    /// Steps done.
    step: u64,
    samples: &'a [Example],
}

#[derive(Debug, Serialize)]
pub(in crate::train) struct ManifestFile {
    path: String,
    what: &'static str,
    #[serde(flatten)]
    entry: FileEntry,
}

/// What is exported where a run ends.
pub(in crate::train) struct Export<'e, 'a, B: Tape<Base = B>> {
    pub bench: &'e mut Workbench<'a, B>,
    /// What this rank knows of the run.
    pub summary: Summary,
}

impl<B: Tape<Base = B>> Export<'_, '_, B> {
    /// Gathers what only all ranks together know, and lets rank 0 write everything.
    pub fn write(mut self) -> Result<(), TrainError> {
        let (bench, mut shown) = (&mut *self.bench, Vec::new());
        if bench.members.rank().0 == 0 {
            bench.enter(Phase::Evaluation, bench.next)?;
            shown = examples(&bench.run, &*bench.feed.samples, &bench.learner);
        }
        bench.enter(Phase::Checkpoint, bench.next)?;
        self.summary.warm_up_seconds = self.bench.stats.warm_up.excess().as_secs_f64();
        self.gather()?;
        self.summary.conclude();
        let written = match self.bench.members.rank() {
            Rank(0) => self.write_results(&shown),
            _ => Ok(()),
        };
        // No rank leaves before the results are on disk; where they cannot be written, that is the cause, and
        // not a rank that is gone.
        let own = [f64::from(u8::from(written.is_err()))];
        let comm = &mut self.bench.members.comm;
        let mut failed = vec![0.0; comm.world()];
        let told = comm.all_gather(Buf::F64(&own), BufMut::F64(&mut failed));
        written?;
        told?;
        let mut ranks = (0..).map(Rank).zip(failed);
        ranks.find(|(_, failed)| *failed != 0.0).map_or(Ok(()), |(rank, _)| Err(TrainError::PeerFailed(rank)))
    }

    fn write_results(&mut self, examples: &[Example]) -> Result<(), TrainError> {
        let Self { bench, summary } = self;
        summary.memory = bench.conclude_memory(summary.seconds_a_step());
        // A launch that found every step trained has nothing to say that the one before did not say better.
        let told = if summary.losses.is_empty() { Summary::read(&bench.run.output_dir) } else { None };
        let told = told.as_ref().filter(|told| told.steps == summary.steps).unwrap_or(summary);
        write(bench, told, examples)?;
        if let Some(memory) = &summary.memory {
            bench.members.link.report(Report::Note(memory.to_string()))?;
        }
        Ok(())
    }

    fn gather(&mut self) -> Result<(), TrainError> {
        let Self { bench, summary, .. } = self;
        const PEAKS: usize = SCOPES * Phase::ALL.len();
        const CACHE: usize = PEAKS + 2;
        const FIELDS: usize = CACHE + 4;
        let peaks = bench.stats.meter.report();
        let mut own = [0.0; FIELDS];
        for (place, phase) in own.chunks_exact_mut(SCOPES).zip(Phase::ALL) {
            if let Some(peak) = peaks.iter().find(|peak| peak.phase == phase) {
                place.copy_from_slice(&[peak.in_use.0 as f64, peak.reserved.0 as f64, peak.driver.0 as f64]);
            }
        }
        own[PEAKS..CACHE].copy_from_slice(&[summary.samples as f64, summary.tokens as f64]);
        if let Some(features) = &bench.features {
            own[CACHE..].copy_from_slice(&features.sums());
        }
        let mut all = vec![0.0; FIELDS * bench.members.comm.world()];
        bench.members.comm.all_gather(Buf::F64(&own), BufMut::F64(&mut all))?;
        let ranks = all.chunks_exact(FIELDS).zip(0..);
        summary.peak_memory = ranks.clone().map(|(x, rank)| RankPeak::new(rank, &x[..PEAKS])).collect();
        if let Some(features) = &mut bench.features {
            let sum = |field: usize| all.chunks_exact(FIELDS).map(|x| x[CACHE + field]).sum::<f64>();
            summary.cache = Some(features.summary([0, 1, 2, 3].map(sum)));
        }
        let seconds = (summary.train_seconds - summary.warm_up_seconds).max(f64::MIN_POSITIVE);
        summary.samples_per_second = ranks.clone().map(|(x, _)| x[PEAKS]).sum::<f64>() / seconds;
        summary.tokens_per_second = ranks.map(|(x, _)| x[PEAKS + 1]).sum::<f64>() / seconds;
        Ok(())
    }
}

impl<B: Tape<Base = B>> Learner<B> {
    /// Writes the task's artifacts of the present weights below `dir`; what does not fit beside them is an
    /// error.
    pub(super) fn export_artifacts(
        &mut self,
        dir: &Path,
        step: Step,
        meter: &Meter,
    ) -> Result<Vec<Artifact>, TrainError> {
        let objective = &*self.objective;
        let bytes = self.checkpoint_bytes().0;
        let mut write = || {
            pulse::allow(bytes);
            self.trainables.lend_whole(|layout, values| objective.export(dir, layout, values))
        };
        // On a host nothing is refused: what has been written is there.
        if B::ON_HOST {
            return Ok(write()?);
        }
        let before = meter.in_use();
        let written = memory::guarded_again(write).map_err(|overrun| {
            let found = meter.out_of_memory(Phase::Checkpoint, overrun.in_use, before.0);
            let source = OutOfMemory { device: overrun.device, ..found };
            TrainError::DoesNotFit { step, source }
        })?;
        Ok(written?)
    }
}

/// Writes everything: what the weights are by now, what was measured, and samples for people.
fn write<B: Tape<Base = B>>(
    bench: &mut Workbench<'_, B>,
    summary: &Summary,
    examples: &[Example],
) -> Result<(), TrainError> {
    let dir = bench.run.output_dir.clone();
    let artifacts = bench.learner.export_artifacts(&dir, bench.next, &bench.stats.meter)?;
    let what = "losses, errors, speed and memory";
    let mut texts = texts(&*bench.feed.samples, bench.run.spec);
    texts.push(TextFile { path: SUMMARY_FILE.to_owned(), what, text: pretty(summary) });
    let shown = SampleFile { step: bench.next.0, samples: examples };
    let what = "held-out samples with their predictions, for the report";
    texts.push(TextFile { path: SAMPLES_FILE.to_owned(), what, text: pretty(&shown) });
    ExportManifest::from_bench(bench).write(&dir, artifacts, texts)
}

/// Leaves the run's specification beside its results to come, so that a checkpoint can be evaluated before
/// the run has ended.
pub(in crate::train) fn write_spec<B: Tape<Base = B>>(run: &Facts<'_, B>) -> Result<(), TrainError> {
    let dir = &run.output_dir;
    fs::create_dir_all(dir).map_err(|source| TrainError::Io {
        action: "create",
        path: dir.clone(),
        source,
    })?;
    write_text(&dir.join(SPEC_FILE), &pretty(run.spec))
}

/// What artifacts are not to be without: what samples are read with, and the run.
pub(in crate::train) fn texts(samples: &dyn Samples, spec: &RunSpec) -> Vec<TextFile> {
    let mut texts = samples.files();
    texts.push(TextFile { path: SPEC_FILE.to_owned(), what: "the run", text: pretty(spec) });
    texts
}

impl<'t> ExportManifest<'t> {
    /// What says of artifacts of this moment what they are.
    pub(in crate::train) fn from_bench<B: Tape<Base = B>>(bench: &'t Workbench<'_, B>) -> Self {
        ExportManifest {
            version: VERSION,
            run: &bench.run.spec.run.name,
            spec_digest: &bench.run.spec_digest,
            base_model: bench.learner.objective.base(),
            steps: bench.next.0,
            files: Vec::new(),
        }
    }

    /// Writes these texts beside the artifacts that are in `dir`, then what all of them are, each with its
    /// checksum.
    pub(in crate::train) fn write(
        mut self,
        dir: &Path,
        artifacts: Vec<Artifact>,
        texts: Vec<TextFile>,
    ) -> Result<(), TrainError> {
        let describe = |path: String, what| {
            let full = dir.join(&path);
            let entry = FileEntry::describe(&full).map_err(|source| TrainError::Io {
                action: "read",
                path: full,
                source,
            })?;
            Ok(ManifestFile { path, what, entry })
        };
        for file in &texts {
            let failed = |source| TrainError::Io { action: "create", path: dir.join(&file.path), source };
            write_text(&place(dir, file).map_err(failed)?, &file.text)?;
        }
        let files = artifacts.into_iter().map(|Artifact { path, what }| (path.to_owned(), what));
        let files = files.chain(texts.into_iter().map(|TextFile { path, what, .. }| (path, what)));
        self.files = files.map(|(path, what)| describe(path, what)).collect::<Result<_, TrainError>>()?;
        write_text(&dir.join("manifest.json"), &pretty(&self))
    }
}

/// Where a text goes below `dir`; the directory is there then.
pub(in crate::train) fn place(dir: &Path, file: &TextFile) -> io::Result<PathBuf> {
    let path = dir.join(&file.path);
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    Ok(path)
}

pub(in crate::train) fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("specs and summaries have only string keys")
}

pub(in crate::train) fn write_text(path: &Path, text: &str) -> Result<(), TrainError> {
    replace(path, |path| fs::File::create(path).and_then(|mut file| file.write_all(text.as_bytes())))
        .map_err(|source| TrainError::Io { action: "write", path: path.to_path_buf(), source })
}
