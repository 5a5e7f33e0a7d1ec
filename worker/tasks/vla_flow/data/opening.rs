//! What opening a data set reads from its files, wherever they lie.

use coxswain_data::{
    DataError,
    lerobot::{Catalog, frames::FrameStore, rows::RowStore},
    place,
};

/// Requests under way at once while a data set in a bucket is opened.
const REQUESTS: usize = 16;

/// Reads the footers of data files and the tables of videos, so many of each, and checks them; side by
/// side where each takes a request.
pub(super) fn check_files(
    catalog: &Catalog,
    rows: &RowStore,
    frames: &FrameStore,
    limit: u32,
) -> Result<(), DataError> {
    let files = (0..catalog.episodes.files.len() as u32).map(|file| (None, file));
    let videos = frames.files(catalog).map(|(camera, file)| (Some(camera), file));
    let all: Vec<_> = files.chain(videos).filter(|(_, file)| *file < limit).collect();
    let check = |&(camera, file): &(Option<usize>, u32)| match camera {
        None => rows.check_file(catalog, file),
        Some(camera) => frames.check_file(catalog, camera, file),
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
