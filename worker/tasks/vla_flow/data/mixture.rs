//! Several data sets as one: `data.sets`.
//!
//! Each is opened as a run on it alone would open it, with its own features, statistics, prompt and cameras.
//! Samples are numbered one set after another, held-out ones included; what an epoch takes of each set, and
//! in which order, is `coxswain_proto::order`.
//!
//! ```text
//! set 0   0 .. 400          sample 402 is sample 2 of set 1: its image and numbers by the statistics of
//! set 1   400 .. 1000       set 1, its state and actions padded with zeros to the widest of all sets
//! ```
//!
//! A camera that a set does not have is not there: neither pixels, nor its tokens in the prompt. The model
//! sees a sample of a robot with fewer cameras, not one whose camera shows black.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::{DataError, Fingerprint, TrainingSamples, WeightedDataset, taken};
use coxswain_feature_store::{SampleKey, Store, StoreError};
use coxswain_models::{Shelf, pretrained::pictures::Rgb};
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_proto::{
    ids::Step,
    order::{DamagedRow, SetShare},
    run_spec::RunSpec,
};
use coxswain_task::{Batch, InputIngredients, Inputs, SampleKeys, Samples, TextFile};

use super::{
    Dataset, Sample,
    batch::{MicroBatch, SampleDims, widened},
    collate::{collate, take_apart},
    run_data::RunData,
};
use crate::{
    settings::checked,
    vla_flow::config::{DataSet, VlaSettings},
};

/// The data sets of a run, opened.
pub struct Mixture {
    members: Vec<Member>,
    shares: Vec<SetShare>,
    training: Arc<TrainingSamples>,
    fingerprint: Fingerprint,
    dims: SampleDims,
}

/// A data set among others.
struct Member {
    name: String,
    dataset: Dataset,
    /// Samples of the sets before it.
    first: u64,
    /// Training samples of the sets before it.
    first_number: u64,
}

impl Mixture {
    /// Opens all data sets of a run, each checked against what the run says of it.
    pub fn from_spec(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Self, DataError> {
        let settings = checked(VlaSettings::from_spec(spec))?;
        let sets = &settings.data.sets;
        let mut members: Vec<Member> = Vec::new();
        let (mut first, mut first_number) = (0, 0);
        for (at, set) in sets.iter().enumerate() {
            let other = members.first().map(|member| &member.dataset);
            let dataset = Dataset::open_beside(&settings.spec_of_set(spec, set), models, sets.len(), other)
                .map_err(|source| of_set(at, set, source))?;
            if let Some(twin) =
                members.iter().find(|member| member.dataset.fingerprint() == dataset.fingerprint())
            {
                let found = format!("the same data set as `{}`", twin.name);
                let remedy = "list each data set once; `weight` sets how often its samples are drawn";
                return Err(of_set(at, set, DataError::invalid(&root(&dataset), "(content)", found, remedy)));
            }
            let (samples, numbers) = (dataset.len(), dataset.training_len());
            members.push(Member { name: set.name().to_owned(), dataset, first, first_number });
            (first, first_number) = (first + samples, first_number + numbers);
        }
        check_widths(&members)?;
        let shares = shares(&members, sets);
        let fingerprints = members.iter().map(|member| member.dataset.fingerprint());
        let fingerprint = Fingerprint::of_sets(fingerprints.zip(shares.iter().map(|share| share.taken)));
        let training = members.iter().flat_map(|Member { dataset, first, .. }| {
            dataset.training_ranges().map(move |range| range.start + first..range.end + first)
        });
        let training = Arc::new(TrainingSamples::new(training));
        Ok(Self { dims: widest(&members), members, shares, training, fingerprint })
    }

    /// The one data set that is looked at: that of `serve.set` where a run has several.
    pub fn one_of(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Dataset, DataError> {
        let settings = checked(VlaSettings::from_spec(spec))?;
        if settings.data.sets.is_empty() {
            return Dataset::from_spec(spec, models);
        }
        let set = settings.data.set(settings.serve.set.as_deref().unwrap_or_default()).map_err(|names| {
            let remedy = format!("a preview shows only one: set serve.set to one of {names}");
            DataError::invalid(Path::new(&spec.data.path), "data.sets", "lists several data sets", remedy)
        })?;
        Dataset::from_spec(&settings.spec_of_set(spec, set), models)
    }

    /// The set that a sample is of, and its number there.
    fn member(&self, index: u64) -> Result<(&Member, u64), DataError> {
        let after = self.members.partition_point(|member| member.first <= index);
        let member = after.checked_sub(1).and_then(|at| self.members.get(at));
        let found = member.map(|member| (member, index - member.first));
        let len = self.members.iter().map(|member| member.dataset.len()).sum();
        found.filter(|(member, own)| *own < member.dataset.len()).ok_or(DataError::OutOfRange {
            what: "sample",
            index,
            len,
        })
    }

    /// Sample `index`, as training sees it.
    pub fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let (member, own) = self.member(index)?;
        Ok(self.padded(member, member.dataset.sample(own)?))
    }

    /// A sample of a set as one of the mixture.
    fn padded(&self, member: &Member, mut sample: Sample) -> Sample {
        sample.index += member.first;
        let SampleDims { state, horizon, action, .. } = self.dims;
        if sample.state.len() < state {
            let frames = member.dataset.settings.observation.frames();
            sample.state = widened(&sample.state, frames, state / frames);
        }
        if sample.action_width < action {
            sample.actions = widened(&sample.actions, horizon, action);
        }
        sample
    }

    /// What of the sets lies at different rates, which chunks of actions do not know.
    fn rates(&self) -> Option<String> {
        let mut rates: BTreeMap<u64, Vec<&str>> = BTreeMap::new();
        for Member { name, dataset, .. } in &self.members {
            rates.entry(dataset.catalog.info.fps.to_bits()).or_default().push(name);
        }
        let horizon = self.dims.horizon;
        let told = rates.iter().map(|(fps, names)| {
            let fps = f64::from_bits(*fps);
            format!("{} at {fps} fps ({:.2} s)", names.join(", "), horizon as f64 / fps)
        });
        (rates.len() > 1).then(|| {
            let told: Vec<_> = told.collect();
            format!(
                "data.sets: recorded at different rates, so a chunk of actions (data.horizon: {horizon}) lasts a different time in each: {}",
                told.join("; ")
            )
        })
    }
}

impl Samples for Mixture {
    fn training(&self) -> &Arc<TrainingSamples> {
        &self.training
    }

    fn shares(&self) -> &[SetShare] {
        &self.shares
    }

    fn holdout(&self) -> Vec<u64> {
        self.members
            .iter()
            .flat_map(|member| member.dataset.holdout().map(|own| own + member.first))
            .collect()
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    fn read(&self, index: u64) -> Result<Box<dyn coxswain_task::Sample>, DataError> {
        Ok(Box::new(self.sample(index)?))
    }

    fn read_in_epoch(&self, index: u64, epoch: u64) -> Result<Box<dyn coxswain_task::Sample>, DataError> {
        let (member, own) = self.member(index)?;
        Ok(Box::new(self.padded(member, member.dataset.sample_in_epoch(own, epoch)?)))
    }

    fn read_beside(
        &self,
        index: u64,
        inputs: Inputs,
    ) -> Result<Option<Box<dyn coxswain_task::Sample>>, DataError> {
        let (member, own) = self.member(index)?;
        let sample = member.dataset.sample_beside(own, inputs)?;
        Ok(sample.map(|sample| Box::new(self.padded(member, sample)) as _))
    }

    fn is_remote(&self) -> bool {
        self.members.iter().any(|member| Samples::is_remote(&member.dataset))
    }

    fn pin(&self, run: &Path) -> Result<(), DataError> {
        self.members.iter().try_for_each(|member| Samples::pin(&member.dataset, run))
    }

    fn bring(&self, index: u64) -> Result<(), DataError> {
        let (member, own) = self.member(index)?;
        match Samples::is_remote(&member.dataset) {
            true => Samples::bring(&member.dataset, own),
            false => Ok(()),
        }
    }

    fn collate(&self, step: Step, samples: &[&dyn coxswain_task::Sample]) -> Box<dyn Batch> {
        let samples: Vec<&Sample> = samples.iter().map(|sample| sample.content()).collect();
        let pad = self.members.first().map_or(0, |member| member.dataset.pad_token());
        Box::new(collate(step, &samples, pad))
    }

    fn take_apart(&self, batch: &dyn Batch) -> Vec<Box<dyn coxswain_task::Sample>> {
        let rows = take_apart(batch.content::<MicroBatch>());
        rows.into_iter().map(|row| Box::new(row) as Box<dyn coxswain_task::Sample>).collect()
    }

    fn damaged_row(&self, index: u64, fault: &DataError) -> DamagedRow {
        // Only samples that exist are asked for.
        let Ok((member, own)) = self.member(index) else {
            return DamagedRow { row: index, begin: 0, end: 1 };
        };
        let DamagedRow { row, begin, end } = member.dataset.damaged_row(own, fault);
        let Member { first, first_number, .. } = member;
        DamagedRow { row: row + first, begin: begin + first_number, end: end + first_number }
    }

    fn keys(&self, store: &Store) -> Result<SampleKeys, StoreError> {
        let (mut keys, mut inputs_read): (Vec<Option<SampleKey>>, _) = (Vec::new(), 0);
        for Member { dataset, .. } in &self.members {
            let own = dataset.sample_keys(store)?;
            keys.extend((0..dataset.len()).map(|index| own.get(index)));
            inputs_read += own.inputs_read;
        }
        Ok(SampleKeys::new(keys, inputs_read))
    }

    fn ingredients(&self) -> Result<InputIngredients, StoreError> {
        let mut all = None;
        // The key of a sample has its whole prompt, so that sets may have templates of their own.
        for Member { dataset, .. } in self.members.iter().rev() {
            let own = Samples::ingredients(dataset)?;
            let prompt = match all.take() {
                Some(InputIngredients { prompt, .. }) => format!("{}\n{prompt}", own.prompt),
                None => own.prompt.clone(),
            };
            all = Some(InputIngredients { prompt, ..own });
        }
        Ok(all.expect("a run file lists at least one set, or it is no mixture"))
    }

    fn files(&self) -> Vec<TextFile> {
        let of = |Member { name, dataset, .. }: &Member| {
            let below = move |file: TextFile| TextFile { path: path_of(name, &file.path), ..file };
            dataset.text_files(self.dims).into_iter().map(below).collect::<Vec<_>>()
        };
        self.members.iter().flat_map(of).collect()
    }

    fn describe(&self) -> Result<Vec<(&'static str, String)>, DataError> {
        let of = |(Member { name, dataset, .. }, SetShare { samples, taken, .. }): (&Member, &SetShare)| {
            let prompt = dataset.prompt_tokens()?;
            let left_out = dataset.selection.describe().map_or(String::new(), |told| format!(", {told}"));
            let text =
                format!("{name}: {samples} samples, {taken} per epoch, {prompt} prompt tokens{left_out}");
            Ok(("data_set", text))
        };
        self.members.iter().zip(&self.shares).map(of).collect()
    }

    fn warnings(&self) -> Vec<String> {
        let of = |Member { name, dataset, .. }: &Member| {
            let told = |line: String| format!("{name}: {line}");
            Samples::warnings(dataset).into_iter().map(told).collect::<Vec<_>>()
        };
        self.members.iter().flat_map(of).chain(self.rates()).collect()
    }
}

impl RunData for Mixture {
    fn dims(&self) -> SampleDims {
        self.dims
    }

    fn set_of(&self, index: u64) -> Option<usize> {
        self.members.partition_point(|member| member.first <= index).checked_sub(1)
    }

    fn denormalize_actions(&self, index: u64, actions: &mut [f32]) {
        let Ok((Member { dataset, .. }, _)) = self.member(index) else { return };
        let own = dataset.dims().action;
        actions
            .chunks_mut(self.dims.action)
            .for_each(|action| dataset.denormalize_actions(&mut action[..own]));
    }

    fn action_names(&self, index: u64) -> Vec<String> {
        self.member(index).map(|(member, own)| member.dataset.action_names(own)).unwrap_or_default()
    }

    fn scene(&self, index: u64) -> (String, Vec<(String, Rgb)>) {
        let found = self.member(index).map(|(member, own)| member.dataset.scene(own));
        found.unwrap_or_default()
    }
}

/// Where a file of one of several sets is, below a run's directory.
pub fn path_of(set: &str, file: &str) -> String {
    format!("sets/{set}/{file}")
}

/// What is wrong with a set, in the run file's words.
pub(super) fn of_set(at: usize, set: &DataSet, source: DataError) -> DataError {
    DataError::Set { at, name: set.name().to_owned(), source: Box::new(source) }
}

fn root(dataset: &Dataset) -> PathBuf {
    dataset.catalog.root.clone()
}

/// Sensors cannot be padded: a window of zeros is a reading, and its encoder has one shape.
fn check_widths(members: &[Member]) -> Result<(), DataError> {
    let sensor = |member: &Member| {
        let dims = member.dataset.dims();
        [dims.sensor_window, dims.sensor_channels]
    };
    let Some(first) = members.first() else { return Ok(()) };
    match members.iter().find(|member| sensor(member) != sensor(first)) {
        None => Ok(()),
        Some(other) => {
            let name =
                other.dataset.sensor.as_ref().map_or("observation.sensor", |sensor| sensor.name.as_str());
            let found = format!(
                "{:?} (window, channels) in `{}`, but {:?} in `{}`; a sensor's window cannot be padded",
                sensor(other),
                other.name,
                sensor(first),
                first.name
            );
            let path: &Path = &other.dataset.catalog.info.path;
            let remedy = "record windows of one shape, or train without data.sensor";
            Err(DataError::invalid(path, format!("features.{name}.shape"), found, remedy))
        }
    }
}

fn widest(members: &[Member]) -> SampleDims {
    let all = members.iter().map(|member| member.dataset.dims());
    all.reduce(SampleDims::widest).unwrap_or_default()
}

fn shares(members: &[Member], sets: &[DataSet]) -> Vec<SetShare> {
    let weighted = members.iter().zip(sets).map(|(member, set)| {
        let samples = member.dataset.training_len();
        match set.share {
            Some(share) => WeightedDataset::by_sets(samples, share),
            None => WeightedDataset::by_samples(samples, set.weight.unwrap_or(1.0)),
        }
    });
    let taken = taken(&weighted.collect::<Vec<_>>());
    let share = |(Member { name, dataset, .. }, taken): (&Member, u64)| SetShare {
        name: name.clone(),
        order_key: dataset.fingerprint().word(),
        samples: dataset.training_len(),
        taken,
    };
    members.iter().zip(taken).map(share).collect()
}
