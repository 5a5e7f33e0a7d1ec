//! Which episodes a run trains on, which it holds out, and that it needs no file of any other.

use std::collections::BTreeSet;

use coxswain_data::{DataError, TrainingSamples, lerobot::Catalog};
use coxswain_proto::run_spec::EpisodeRange;

use crate::vla_flow::config::Data;

/// The episodes of a run.
pub(super) struct Selection {
    /// Episodes that are trained on, in order.
    trained: Vec<u64>,
    /// Episodes that are held out.
    pub(super) holdout: BTreeSet<u64>,
    /// Episodes and frames that `data.exclude_episodes` leaves out.
    excluded: (u64, u64),
}

impl Selection {
    /// The selection in a data set, as the run says it.
    pub(super) fn from_catalog(catalog: &Catalog, data: &Data, holdout: &[usize]) -> Result<Self, DataError> {
        let episodes = &catalog.episodes.episodes;
        let count = episodes.len() as u64;
        let wrong = |found: String, remedy: &str| {
            Err(DataError::invalid(&catalog.info.path, "total_episodes", found, remedy))
        };
        let holdout: BTreeSet<u64> = holdout.iter().map(|episode| *episode as u64).collect();
        if let Some(missing) = holdout.iter().find(|episode| **episode >= count) {
            let found = format!("no episode {missing}; there are {count}, counted from 0");
            return wrong(found, "correct data.holdout_episodes");
        }
        for (key, listed) in [("episodes", &data.episodes), ("exclude_episodes", &data.exclude_episodes)] {
            if let Some(beyond) = listed.iter().find(|range| range.last >= count) {
                let found = format!("no episodes {beyond}; there are {count}, counted from 0");
                return wrong(found, &format!("correct data.{key}"));
            }
        }
        let is_among =
            |listed: &[EpisodeRange], episode: u64| listed.iter().any(|range| range.contains(episode));
        let is_excluded = |episode: u64| is_among(&data.exclude_episodes, episode);
        if let Some(both) = holdout.iter().find(|episode| is_excluded(**episode)) {
            let found = format!("episode {both} is in data.holdout_episodes and in data.exclude_episodes");
            return wrong(found, "remove it from one of them");
        }
        let is_listed = |episode: u64| data.episodes.is_empty() || is_among(&data.episodes, episode);
        let trained = (0..count).filter(|n| is_listed(*n) && !is_excluded(*n) && !holdout.contains(n));
        let trained: Vec<u64> = trained.collect();
        if trained.is_empty() {
            let found = "data.holdout_episodes and data.exclude_episodes leave no episode to train on (of data.episodes, if it is set)";
            return wrong(found.into(), "leave at least one episode to train on");
        }
        let lost = (0..).zip(episodes).filter(|(number, _)| is_excluded(*number));
        let excluded = lost.fold((0, 0), |(count, frames), (_, lost)| (count + 1, frames + lost.length));
        Ok(Self { trained, holdout, excluded })
    }

    /// The samples that are trained on.
    pub(super) fn training(&self, catalog: &Catalog) -> TrainingSamples {
        let episode = |number: &u64| &catalog.episodes.episodes[*number as usize];
        TrainingSamples::new(self.trained.iter().map(episode).map(|episode| episode.start..episode.end()))
    }

    /// Whether anything of an episode is read.
    pub(super) fn is_read(&self, episode: u64) -> bool {
        self.trained.binary_search(&episode).is_ok() || self.holdout.contains(&episode)
    }

    /// How many episodes are trained on.
    pub(super) fn trained(&self) -> usize {
        self.trained.len()
    }

    /// What is left out by `data.exclude_episodes`, in words; none where it names nothing.
    pub(super) fn describe(&self) -> Option<String> {
        let (episodes, frames) = self.excluded;
        let s = if episodes == 1 { "" } else { "s" };
        let told = || format!("{episodes} episode{s} with {frames} frames left out (data.exclude_episodes)");
        (episodes > 0).then(told)
    }
}
