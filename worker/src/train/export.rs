//! What a user takes away from a run, written by rank 0 once training is over.
//!
//! ```text
//! ..                    the task's artifacts: adapters, weights, statistics
//! run_spec.json         the run
//! summary.json          losses, held-out error, speed, memory of every rank
//! manifest.json         what each file is, with checksums; written last
//! ```
//!
//! Every file appears by rename, so a crash leaves the previous export or the new one, file by file.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::Path,
};

use coxswain_proto::{VERSION, ids::Step};
use serde::{Deserialize, Serialize};

use super::{
    TrainError, checkpoint::FileEntry, evaluate::HeldOutError, features::CacheSummary, run::Training,
};
use coxswain_nn::{files::replace, kernels::Tape, pulse};
use coxswain_task::TextFile;

use crate::{
    collective::{Buf, BufMut},
    link::{Phase, Report, StepReport},
    memory::{self, OutOfMemory, PhasePeak, prediction::outcome::Outcome},
};

const SPEC_FILE: &str = "run_spec.json";
/// The run in numbers.
const SUMMARY_FILE: &str = "summary.json";
/// Scopes of a peak: in use, reserved, driver.
const SCOPES: usize = 3;

/// `summary.json`: a run in numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Summary {
    /// Steps committed over the life of the run.
    pub steps: u64,
    /// The step this process started with: more than 0 after a resume.
    pub first_step: u64,
    /// Whether the run was stopped before its last step.
    pub stopped: bool,
    /// Ranks.
    pub world_size: u32,
    /// Mean loss of this process's first steps (up to 10).
    pub loss_first: f64,
    /// Mean loss of its last steps (up to 10).
    pub loss_last: f64,
    /// Loss of every step of this process.
    pub losses: Vec<f64>,
    /// Held-out error before the first of these steps.
    pub error_before: Option<HeldOutError>,
    /// Held-out error after the last.
    pub error_after: Option<HeldOutError>,
    /// Seconds from the first of these steps to the last.
    pub train_seconds: f64,
    /// Of these, what rank 0's first step on a card took beyond those after it: kernels compiled and products tuned.
    #[serde(default)]
    pub warm_up_seconds: f64,
    /// Samples trained on per second, over all ranks, without the warm-up.
    pub samples_per_second: f64,
    /// Prompt tokens per second, likewise.
    pub tokens_per_second: f64,
    /// Largest sightings of each rank's memory, in bytes.
    pub peak_memory: Vec<RankPeak>,
    /// Rank 0's memory, predicted and measured.
    #[serde(default)]
    pub memory: Option<Outcome>,
    /// What the feature cache did; none if it was off.
    #[serde(default)]
    pub cache: Option<CacheSummary>,
    #[serde(skip)]
    tokens: u64,
    #[serde(skip)]
    samples: u64,
}

/// Largest sightings of one rank's memory, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPeak {
    /// Which.
    pub rank: u32,
    /// Allocator, in use.
    pub in_use: u64,
    /// Allocator, reserved.
    pub reserved: u64,
    /// Driver, or resident set.
    pub driver: u64,
    /// The same for each phase the rank was in.
    #[serde(default)]
    pub phases: BTreeMap<String, PhasePeak>,
}

impl RankPeak {
    /// From the peaks of [`Phase::ALL`], zero where a phase was never entered.
    fn new(rank: u32, peaks: &[f64]) -> Self {
        let mut all = PhasePeak::default();
        let mut phases = BTreeMap::new();
        for (phase, peak) in Phase::ALL.iter().zip(peaks.chunks_exact(SCOPES)) {
            let peak = PhasePeak { in_use: peak[0] as u64, reserved: peak[1] as u64, driver: peak[2] as u64 };
            if peak != PhasePeak::default() {
                all = all.or(peak);
                phases.insert(phase.name().to_owned(), peak);
            }
        }
        Self { rank, in_use: all.in_use, reserved: all.reserved, driver: all.driver, phases }
    }
}

impl Summary {
    /// Nothing has happened yet.
    pub(super) fn new() -> Self {
        Self {
            steps: 0,
            first_step: 0,
            stopped: false,
            world_size: 0,
            loss_first: f64::NAN,
            loss_last: f64::NAN,
            losses: Vec::new(),
            error_before: None,
            error_after: None,
            train_seconds: 0.0,
            warm_up_seconds: 0.0,
            samples_per_second: 0.0,
            tokens_per_second: 0.0,
            peak_memory: Vec::new(),
            memory: None,
            cache: None,
            tokens: 0,
            samples: 0,
        }
    }

    /// A generation of `world_size` ranks begins at `step`: where this process begins, or goes on, or goes back to.
    pub(super) fn begin(&mut self, step: Step, world_size: u32) {
        self.world_size = world_size;
        if self.losses.is_empty() || step.0 < self.first_step {
            self.first_step = step.0;
        }
        self.losses.truncate((step.0 - self.first_step) as usize);
        self.steps = step.0;
    }

    /// One committed step.
    pub(super) fn book(&mut self, done: &StepReport) {
        self.steps = done.step.0 + 1;
        self.losses.push(done.totals.loss_sum / done.totals.valid_count.max(1.0));
        self.tokens += done.tokens;
        self.samples += done.positions.iter().map(|range| range.end - range.start).sum::<u64>();
        self.train_seconds += done.times.total.as_secs_f64();
    }

    /// What an earlier launch left in `dir`; none if that cannot be read.
    fn read(dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(dir.join(SUMMARY_FILE)).ok()?).ok()
    }

    fn conclude(&mut self) {
        const SHOWN: usize = 10;
        // Of nothing it is not a number, and null in the file.
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        self.loss_first = mean(&self.losses[..self.losses.len().min(SHOWN)]);
        self.loss_last = mean(&self.losses[self.losses.len().saturating_sub(SHOWN)..]);
    }
}

/// `manifest.json`: what each exported file is.
#[derive(Debug, Serialize)]
struct Manifest<'a> {
    version: &'a str,
    run: &'a str,
    spec_digest: &'a str,
    base_model: &'a str,
    steps: u64,
    files: Vec<ManifestFile>,
}

#[derive(Debug, Serialize)]
struct ManifestFile {
    path: String,
    what: &'static str,
    #[serde(flatten)]
    entry: FileEntry,
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Gathers what only all ranks together know, and lets rank 0 write everything.
    pub(super) fn export(&mut self, error_after: Option<HeldOutError>) -> Result<(), TrainError> {
        self.enter(Phase::Checkpoint, self.next)?;
        let mut summary = self.summary.clone();
        summary.error_before = self.before.clone().flatten();
        summary.error_after = error_after;
        summary.stopped = self.stopped;
        summary.warm_up_seconds = self.warm_up.excess().as_secs_f64();
        self.gather(&mut summary)?;
        summary.conclude();
        if self.rank().0 == 0 {
            summary.memory = self.conclude_memory();
            // A launch that found every step trained has nothing to say that the one before did not say better.
            let told = if summary.losses.is_empty() { Summary::read(&self.output_dir) } else { None };
            self.write_export(told.as_ref().filter(|told| told.steps == summary.steps).unwrap_or(&summary))?;
            if let Some(memory) = &summary.memory {
                self.link.report(Report::Note(memory.to_string()))?;
            }
        }
        // Nobody leaves before the results are on disk.
        self.comm.barrier()?;
        Ok(())
    }

    /// Leaves the run's specification beside its results to come, so that a checkpoint can be evaluated before the run has ended.
    pub(super) fn write_spec(&self) -> Result<(), TrainError> {
        let dir = &self.output_dir;
        fs::create_dir_all(dir).map_err(|source| TrainError::Io {
            action: "create",
            path: dir.clone(),
            source,
        })?;
        write_text(&dir.join(SPEC_FILE), &pretty(self.spec))
    }

    fn gather(&mut self, summary: &mut Summary) -> Result<(), TrainError> {
        const PEAKS: usize = SCOPES * Phase::ALL.len();
        const CACHE: usize = PEAKS + 2;
        const FIELDS: usize = CACHE + 4;
        let peaks = self.meter.report();
        let mut own = [0.0; FIELDS];
        for (place, phase) in own.chunks_exact_mut(SCOPES).zip(Phase::ALL) {
            if let Some(peak) = peaks.iter().find(|peak| peak.phase == phase) {
                place.copy_from_slice(&[peak.in_use.0 as f64, peak.reserved.0 as f64, peak.driver.0 as f64]);
            }
        }
        own[PEAKS..CACHE].copy_from_slice(&[summary.samples as f64, summary.tokens as f64]);
        if let Some(features) = &self.features {
            own[CACHE..].copy_from_slice(&features.sums());
        }
        let mut all = vec![0.0; FIELDS * self.comm.world()];
        self.comm.all_gather(Buf::F64(&own), BufMut::F64(&mut all))?;
        let ranks = all.chunks_exact(FIELDS).zip(0..);
        summary.peak_memory = ranks.clone().map(|(x, rank)| RankPeak::new(rank, &x[..PEAKS])).collect();
        if let Some(features) = &mut self.features {
            let sum = |field: usize| all.chunks_exact(FIELDS).map(|x| x[CACHE + field]).sum::<f64>();
            summary.cache = Some(features.summary([0, 1, 2, 3].map(sum)));
        }
        let seconds = (summary.train_seconds - summary.warm_up_seconds).max(f64::MIN_POSITIVE);
        summary.samples_per_second = ranks.clone().map(|(x, _)| x[PEAKS]).sum::<f64>() / seconds;
        summary.tokens_per_second = ranks.map(|(x, _)| x[PEAKS + 1]).sum::<f64>() / seconds;
        Ok(())
    }

    fn write_export(&mut self, summary: &Summary) -> Result<(), TrainError> {
        let (dir, objective) = (&self.output_dir, &*self.objective);
        let bytes = self.checkpoint_bytes().0;
        let mut write = || {
            pulse::allow(bytes);
            self.trainables.lend(|layout, values| objective.export(dir, layout, values))
        };
        // On a host nothing is refused: what has been written is there.
        let written = if B::ON_HOST {
            write()?
        } else {
            let before = self.meter.in_use();
            let written = memory::guarded_again(write).map_err(|overrun| {
                let found = self.meter.out_of_memory(Phase::Checkpoint, overrun.in_use, before.0);
                let source = OutOfMemory { device: overrun.device, ..found };
                TrainError::DoesNotFit { step: self.next, source }
            })?;
            written?
        };
        let mut files: Vec<_> = written.into_iter().map(|artifact| (artifact.path, artifact.what)).collect();
        for TextFile { path, what, text } in self.samples.files() {
            write_text(&dir.join(path), &text)?;
            files.push((path, what));
        }
        let texts = [
            (SPEC_FILE, "the run", pretty(self.spec)),
            (SUMMARY_FILE, "losses, errors, speed and memory", pretty(summary)),
        ];
        for (file, what, text) in texts {
            write_text(&dir.join(file), &text)?;
            files.push((file, what));
        }
        self.write_manifest(&files)
    }

    fn write_manifest(&self, files: &[(&'static str, &'static str)]) -> Result<(), TrainError> {
        let describe = |&(path, what): &(&str, &'static str)| {
            let full = self.output_dir.join(path);
            let entry = FileEntry::of(&full).map_err(|source| TrainError::Io {
                action: "read",
                path: full,
                source,
            })?;
            Ok(ManifestFile { path: path.to_owned(), what, entry })
        };
        let manifest = Manifest {
            version: VERSION,
            run: &self.spec.run.name,
            spec_digest: &self.spec_digest,
            base_model: self.objective.base(),
            steps: self.next.0,
            files: files.iter().map(describe).collect::<Result<_, TrainError>>()?,
        };
        write_text(&self.output_dir.join("manifest.json"), &pretty(&manifest))
    }
}

fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("specs and summaries have only string keys")
}

fn write_text(path: &Path, text: &str) -> Result<(), TrainError> {
    replace(path, |path| fs::File::create(path).and_then(|mut file| file.write_all(text.as_bytes())))
        .map_err(|source| TrainError::Io { action: "write", path: path.to_path_buf(), source })
}

