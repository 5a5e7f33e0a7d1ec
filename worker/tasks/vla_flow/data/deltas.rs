//! Actions as differences from the state at the beginning of their chunk, as openpi's `DeltaActions` and
//! LeRobot's relative actions make them, and the statistics of such actions.
//!
//! ```text
//! learned[k, d] = action[k, d] - state[0, d]        where data.delta_actions has true for d
//!                 action[k, d]                      elsewhere
//! ```
//!
//! A data set's own statistics are those of what was recorded. Those of differences are computed as LeRobot
//! does it (`compute_relative_action_stats`): over every chunk that lies within its episode, all of the data
//! set, held-out episodes among them; quantiles from a histogram of 5000 bins. Two passes over the numbers,
//! an episode in memory at a time; once for a run (`kept`). An episode that cannot be read has no part in
//! them: its samples fail where they are read.

use std::path::Path;

use coxswain_data::{
    DataError, NormMode, Normalizer,
    lerobot::{
        Catalog,
        episodes::Episode,
        rows::{Part, RowStore},
        stats::{FeatureStats, Stats},
    },
};

use super::{kept::KeptStats, numeric::Numeric};
use crate::vla_flow::config::Data;

/// Bins of a histogram, as LeRobot has them.
const BINS: usize = 5000;
/// The quantiles that LeRobot keeps.
const QUANTILES: [(&str, f64); 5] = [("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)];

/// Which dimensions of an action are differences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeltaActions {
    /// May be shorter than an action: what follows is as recorded.
    mask: Vec<bool>,
}

impl DeltaActions {
    /// From `data.delta_actions`.
    pub fn new(mask: &[bool]) -> Self {
        Self { mask: mask.to_vec() }
    }

    /// Whether any dimension is a difference.
    pub fn any(&self) -> bool {
        self.mask.contains(&true)
    }

    /// One past the last dimension that is a difference.
    pub fn reach(&self) -> usize {
        self.mask.iter().rposition(|is_delta| *is_delta).map_or(0, |last| last + 1)
    }

    /// What is added to the learned values of every action of a chunk to have the recorded ones: `[action]`,
    /// from the state as recorded.
    pub fn offset(&self, state: &[f32], action: usize) -> Vec<f32> {
        let is_delta = |dim: usize| self.mask.get(dim) == Some(&true);
        (0..action).map(|dim| if is_delta(dim) { state[dim] } else { 0.0 }).collect()
    }
}

/// Where numbers of a data set are read for statistics.
pub(super) struct RecordedNumbers<'a> {
    pub(super) catalog: &'a Catalog,
    pub(super) rows: &'a RowStore,
    pub(super) state: &'a Numeric,
    pub(super) action: &'a Numeric,
    /// The run's directory.
    pub(super) run: &'a Path,
}

/// How actions are normalised that the data set has no statistics of.
pub(super) struct LearnedActions {
    pub(super) normalizer: Normalizer,
    pub(super) stats: FeatureStats,
}

impl RecordedNumbers<'_> {
    /// Where some dimensions are differences, how they are normalised; none where the data set's own
    /// statistics do, or none are needed.
    pub(super) fn learned(
        &self,
        deltas: &DeltaActions,
        data: &Data,
    ) -> Result<Option<LearnedActions>, DataError> {
        let Self { catalog, state, action, .. } = self;
        let (given, reach, path) = (deltas.mask.len(), deltas.reach(), &catalog.info.path);
        if given > action.width || reach > state.width {
            let found = format!(
                "has {given} values, the last `true` at index {}, but the action has {} dimensions \
                 and the state {}",
                reach.saturating_sub(1),
                action.width,
                state.width
            );
            let remedy = "shorten the list, or use `false` where the state has no such dimension";
            return Err(DataError::invalid(path, "data.delta_actions", found, remedy));
        }
        if !deltas.any() || data.normalization.action == NormMode::Identity {
            return Ok(None);
        }
        let recipe = format!("{:?} of {}: {:?}", deltas.mask, state.name, [data.horizon, data.action_stride]);
        let depends_on = [("data", &catalog.fingerprint.0[..]), ("recipe", recipe.as_bytes())];
        let kept = KeptStats::new(self.run, &action.name, &depends_on);
        let stats = kept.or(|| self.statistics(deltas, data.horizon, data.action_stride))?;
        let named = Stats([(action.name.clone(), stats.clone())].into());
        let mode = data.normalization.action;
        let normalizer = Normalizer::of(Some(&named), path, &action.name, action.width, mode)?;
        Ok(Some(LearnedActions { normalizer, stats }))
    }

    /// The statistics of chunks of `horizon` actions, `stride` rows apart.
    fn statistics(
        &self,
        deltas: &DeltaActions,
        horizon: usize,
        stride: usize,
    ) -> Result<FeatureStats, DataError> {
        let width = self.action.width;
        let mut dims = vec![Dimension::default(); width];
        let (mut readable, mut lost) = (Vec::new(), Vec::new());
        for (number, episode) in self.catalog.episodes.episodes.iter().enumerate() {
            match self.numbers_of(episode) {
                Ok(numbers) => {
                    self.visit(deltas, [horizon, stride], &numbers, |dim, value| dims[dim].see(value));
                    readable.push(episode);
                }
                Err(error) => lost.push((number, error)),
            }
        }
        if let Some((number, error)) = lost.first() {
            let episodes = lost.len();
            tracing::warn!(
                %error,
                "unreadable episodes left out of the statistics of relative actions: {episodes} (the first: episode {number})"
            );
        }
        if let Some((_, error)) = lost.pop().filter(|_| readable.is_empty()) {
            return Err(error);
        }
        if dims.iter().any(|dim| dim.count == 0) {
            let rows = (horizon - 1) * stride + 1;
            return Err(DataError::invalid(
                &self.catalog.info.path,
                "data.delta_actions",
                format!("no episode has {rows} rows (a whole chunk), so relative actions have no statistics"),
                "lower data.horizon or data.action_stride",
            ));
        }
        dims.iter_mut().for_each(Dimension::begin_histogram);
        for episode in readable {
            let numbers = self.numbers_of(episode)?;
            self.visit(deltas, [horizon, stride], &numbers, |dim, value| dims[dim].sort(value));
        }
        let each = |of: &dyn Fn(&Dimension) -> f64| dims.iter().map(of).collect::<Vec<_>>();
        let mut stats = FeatureStats::from([
            ("count".to_owned(), vec![dims.first().map_or(0.0, |dim| dim.count as f64)]),
            ("mean".to_owned(), each(&Dimension::mean)),
            ("std".to_owned(), each(&|dim| (dim.squares / dim.count as f64).sqrt())),
            ("min".to_owned(), each(&|dim| dim.min)),
            ("max".to_owned(), each(&|dim| dim.max)),
        ]);
        stats.extend(QUANTILES.map(|(name, q)| (name.to_owned(), each(&|dim| dim.quantile(q)))));
        Ok(stats)
    }

    /// All rows of an episode.
    fn numbers_of(&self, episode: &Episode) -> Result<Numbers, DataError> {
        let mut numbers = Numbers::default();
        let (mut row, end) = (episode.first_row, episode.first_row + episode.length);
        while row < end {
            let block = self.rows.block(self.catalog, episode.file, row, Part::Numbers)?;
            let last = end.min(block.first_row + block.rows as u64);
            for row in row..last {
                // A step that needs a row with a number that is none fails, and says so.
                self.state.append(&block, row, &mut numbers.states);
                self.action.append(&block, row, &mut numbers.actions);
            }
            row = last;
        }
        Ok(numbers)
    }

    /// Every value of every whole chunk of an episode, by its dimension.
    fn visit(
        &self,
        deltas: &DeltaActions,
        [horizon, stride]: [usize; 2],
        Numbers { states, actions }: &Numbers,
        mut see: impl FnMut(usize, f32),
    ) {
        let (state_width, width) = (self.state.width, self.action.width);
        let frames = actions.len() / width;
        for first in 0..frames.saturating_sub((horizon - 1) * stride) {
            let offset = deltas.offset(&states[first * state_width..][..state_width], width);
            let chunk = (first..).step_by(stride).take(horizon);
            let chunk = chunk.flat_map(|at| actions[at * width..][..width].iter().zip(&offset).enumerate());
            for (dim, (action, offset)) in chunk {
                let value = action - offset;
                if value.is_finite() {
                    see(dim, value);
                }
            }
        }
    }
}

/// Numbers of an episode, as recorded.
#[derive(Default)]
struct Numbers {
    /// `[frames, state]`.
    states: Vec<f32>,
    /// `[frames, action]`.
    actions: Vec<f32>,
}

/// What is known of one dimension.
#[derive(Clone, Debug)]
struct Dimension {
    count: u64,
    sum: f64,
    min: f64,
    max: f64,
    /// Sum of squared distances from the mean.
    squares: f64,
    bins: Vec<u64>,
}

impl Default for Dimension {
    fn default() -> Self {
        let (min, max) = (f64::INFINITY, f64::NEG_INFINITY);
        Self { count: 0, sum: 0.0, min, max, squares: 0.0, bins: Vec::new() }
    }
}

impl Dimension {
    fn see(&mut self, value: f32) {
        let value = f64::from(value);
        self.count += 1;
        self.sum += value;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    fn begin_histogram(&mut self) {
        self.bins = vec![0; BINS];
    }

    fn sort(&mut self, value: f32) {
        let value = f64::from(value);
        self.squares += (value - self.mean()).powi(2);
        let place = (value - self.min) / (self.max - self.min).max(f64::MIN_POSITIVE) * BINS as f64;
        self.bins[(place as usize).min(BINS - 1)] += 1;
    }

    /// Within the bin that it falls in, as if its values were spread evenly.
    fn quantile(&self, q: f64) -> f64 {
        let wanted = q * self.count as f64;
        let (mut below, width) = (0.0, (self.max - self.min) / BINS as f64);
        for (bin, &count) in self.bins.iter().enumerate() {
            let count = count as f64;
            if below + count >= wanted && count > 0.0 {
                return self.min + width * (bin as f64 + (wanted - below) / count);
            }
            below += count;
        }
        self.max
    }
}
