//! What opening a data set reads from its files, wherever they lie.

use std::collections::BTreeSet;

use coxswain_data::{
    DataError,
    lerobot::{Catalog, frames::FrameStore, rows::RowStore},
    place,
};

use super::selection::Selection;

/// Requests under way at once while a data set in a bucket is opened.
const REQUESTS: usize = 16;

/// Reads the footers of data files and the tables of videos, so many of each, and checks them as far as the
/// run's episodes are in them; side by side where each takes a request. Data files have to be there.
pub(super) fn check_files(
    catalog: &Catalog,
    rows: &RowStore,
    frames: &FrameStore,
    selection: &Selection,
    limit: usize,
) -> Result<(), DataError> {
    let is_read = |episode: u64| selection.is_read(episode);
    let read = (0..).zip(&catalog.episodes.episodes).filter(|(number, _)| is_read(*number));
    let files: BTreeSet<u32> = read.map(|(_, episode)| episode.file).collect();
    if let Some(missing) = files.intersection(&catalog.missing).next() {
        return Err(catalog.missing_file(*missing));
    }
    let files = files.into_iter().take(limit).map(|file| (None, file));
    let mut all: Vec<_> = files.collect();
    for camera in 0..frames.cameras() {
        let table = frames.table(catalog, camera);
        let files = (0..table.files.len() as u32).filter(|file| table.episodes_of(*file).any(is_read));
        all.extend(files.take(limit).map(|file| (Some(camera), file)));
    }
    let check = |&(camera, file): &(Option<usize>, u32)| match camera {
        None => rows.check_file(catalog, file),
        Some(camera) => frames.check_file(catalog, camera, file, &is_read),
    };
    let at_once = if place::is_remote(&catalog.root) { REQUESTS } else { 1 };
    for some in all.chunks(at_once) {
        let checked: Vec<_> = std::thread::scope(|scope| {
            let others: Vec<_> = some[1..].iter().map(|one| scope.spawn(move || check(one))).collect();
            let first = [Ok(check(&some[0]))].into_iter();
            first.chain(others.into_iter().map(|other| other.join())).collect()
        });
        for outcome in checked {
            outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
    }
    Ok(())
}
