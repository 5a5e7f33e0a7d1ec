//! Everything that can be wrong with a data set, from its metadata to decoded frames.

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use coxswain_data::{
    DataError,
    lerobot::{Catalog, episodes::parquet_files},
};
use rayon::prelude::*;
use serde::Serialize;

use crate::{
    findings::{Finding, Findings, Severity},
    frames::{Cameras, Frames},
    judge::judge,
    moments::{Dim, Total},
    scan::{Scan, Scanner},
};

/// Told how many episodes are done, and of how many.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Episodes read at once for each thread: enough to keep all busy, little to hold.
const EPISODES_A_THREAD: usize = 16;

/// What a data set is like.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Directory.
    pub path: PathBuf,
    /// Episodes, as far as they are known.
    pub episodes: u64,
    /// Frames of all episodes.
    pub frames: u64,
    /// Data files and videos.
    pub files: u64,
    /// Frames of all cameras that were decoded.
    pub decoded: u64,
    /// Frames of all cameras that there are.
    pub pictures: u64,
    /// What is wrong, errors first.
    pub findings: Vec<Finding>,
    /// Findings beyond those that are listed.
    pub left_out: u64,
}

impl Report {
    /// Findings of a severity.
    pub fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }
}

/// Checks the data set at `dir`, decoding these frames of each episode.
pub fn check(dir: &Path, frames: Frames, progress: Progress<'_>) -> Report {
    let mut findings = Findings::default();
    let mut report = Report { path: dir.to_path_buf(), ..Report::default() };
    match Catalog::open(dir) {
        Ok(catalog) => EpisodeChecker { catalog: &catalog, frames, progress }.run(&mut report, &mut findings),
        Err(error) if error.is_remote() => findings.add(Finding::of(&error, dir, "unreachable")),
        Err(error) => findings.add(Finding::of(&error, dir, "metadata")),
    }
    (report.findings, report.left_out) = findings.into_list();
    report
}

struct EpisodeChecker<'a> {
    catalog: &'a Catalog,
    frames: Frames,
    progress: Progress<'a>,
}

/// What is found in an episode.
struct EpisodeScan {
    scan: Scan,
    decoded: u64,
}

impl EpisodeChecker<'_> {
    fn run(&self, report: &mut Report, findings: &mut Findings) {
        let catalog = self.catalog;
        report.episodes = catalog.info.episodes;
        report.frames = catalog.info.frames;
        let videos = catalog.videos.iter().map(|table| table.files.len()).sum::<usize>();
        report.files = (catalog.episodes.files.len() + videos) as u64;
        let scanner = Scanner::new(catalog);
        let cameras = match Cameras::new(catalog, rayon::current_num_threads()) {
            Ok(cameras) => cameras,
            Err(error) => return findings.add(Finding::of(&error, &catalog.root, "metadata")),
        };
        report.pictures = report.frames * cameras.cameras.len() as u64;
        self.metadata(findings);
        let broken_videos = cameras.check_files();
        let files = 0..catalog.episodes.files.len() as u32;
        let whole: Vec<Result<(), DataError>> = files
            .into_par_iter()
            .map(|file| match catalog.missing.contains(&file) {
                true => Err(catalog.missing_file(file)),
                false => scanner.check_file(file).and_then(|()| cameras.check_file(file)),
            })
            .collect();
        let broken = (0..).zip(&whole).filter_map(|(file, whole)| Some((file, whole.as_ref().err()?)));
        findings.extend(broken.map(|(file, error)| {
            let kind = if catalog.missing.contains(&file) { "missing" } else { "unreadable" };
            Finding::of(error, &catalog.root, kind)
        }));
        let has_no_video = |camera: usize, episode: u64| {
            let path = cameras.video(camera, episode);
            path.is_some_and(|path| broken_videos.iter().any(|broken| broken.file == path))
        };
        let done = AtomicU64::new(0);
        let see = |episode: u64| {
            let mut seen = EpisodeScan { scan: Scan { features: None, findings: Vec::new() }, decoded: 0 };
            let entry = &catalog.episodes.episodes[episode as usize];
            if whole[entry.file as usize].is_ok() {
                seen.scan = scanner.scan(episode, false);
                let frames = self.frames.of(entry.length);
                let there = (0..cameras.cameras.len()).filter(|camera| !has_no_video(*camera, episode));
                for camera in there {
                    seen.decoded += frames.len() as u64;
                    seen.scan.findings.extend(self.look(&cameras, camera, episode, &frames));
                }
            }
            (self.progress)(done.fetch_add(1, Ordering::Relaxed) + 1, catalog.info.episodes);
            seen
        };
        let mut totals: Vec<Vec<Total>> =
            scanner.features.iter().map(|feature| vec![Total::default(); feature.dims()]).collect();
        let take = |episode, seen: EpisodeScan| {
            report.decoded += seen.decoded;
            findings.extend(seen.scan.findings);
            add(&mut totals, episode, seen.scan.features);
            ControlFlow::Continue(())
        };
        // Nothing in it breaks off.
        let _: ControlFlow<()> = in_order(catalog.info.episodes, see, take);
        findings.extend(broken_videos.clone());
        // Of a part of the data set nothing can be said that holds for all of it.
        if whole.iter().all(Result::is_ok) {
            findings.extend(judge(catalog, &scanner.features, &totals));
        }
    }

    /// Files that are too many or too few, and features that are not read.
    fn metadata(&self, findings: &mut Findings) {
        let catalog = self.catalog;
        let root = &catalog.root;
        if catalog.stats.is_none() {
            let finding = Finding::warning("no statistics", "no such file", "`cox data stats` writes it");
            findings.add(finding.file(root, &catalog.stats_path));
        }
        let depth = catalog.info.features.iter().filter(|(_, feature)| feature.is_depth());
        let told = depth.map(|(name, _)| Finding::of(&catalog.info.depth(name), root, "depth"));
        findings.extend(told.map(|finding| Finding { severity: Severity::Warning, ..finding }));
        let named = (0..catalog.episodes.files.len() as u32).filter_map(|file| catalog.data_path(file).ok());
        let named: std::collections::HashSet<_> = named.collect();
        let there = parquet_files(&root.join("data")).unwrap_or_default();
        findings.extend(there.iter().filter(|path| !named.contains(*path)).map(|path| {
            let found = "the episode table does not name this file";
            Finding::warning("not used", found, "restore the episode table, or delete the file")
                .file(root, path)
        }));
    }

    fn look(&self, cameras: &Cameras<'_>, camera: usize, episode: u64, frames: &[u64]) -> Vec<Finding> {
        let (colours, mut findings) = cameras.look(camera, episode, frames);
        if colours.is_plain() {
            let found = format!("every decoded frame is a single colour (decoded: {})", colours.pictures);
            let finding = Finding::warning(
                "plain pictures",
                found,
                "leave the episode out if the camera was covered or off",
            );
            findings.push(finding.feature(&cameras.cameras[camera].name).episode(episode));
        }
        findings
    }
}

/// Adds an episode's numbers to those of all.
fn add(totals: &mut [Vec<Total>], episode: u64, features: Option<Vec<Vec<Dim>>>) {
    for (totals, dims) in totals.iter_mut().zip(features.into_iter().flatten()) {
        totals.iter_mut().zip(&dims).for_each(|(total, dim)| total.add_episode(episode, dim));
    }
}

/// Works on episodes in parallel and hands over the results in order: floating point sums then do not depend
/// on the number of cores. Holds those of a few hundred episodes at a time.
pub fn in_order<V: Send, E>(
    episodes: u64,
    work: impl Fn(u64) -> V + Sync,
    mut take: impl FnMut(u64, V) -> ControlFlow<E>,
) -> ControlFlow<E> {
    let at_once = (EPISODES_A_THREAD * rayon::current_num_threads()) as u64;
    for first in (0..episodes).step_by(at_once as usize) {
        let range = first..(first + at_once).min(episodes);
        let done: Vec<V> = range.clone().into_par_iter().map(&work).collect();
        range.zip(done).try_for_each(|(episode, value)| take(episode, value))?;
    }
    ControlFlow::Continue(())
}
