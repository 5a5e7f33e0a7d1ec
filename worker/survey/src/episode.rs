//! An episode as it was recorded: pictures as they are stored, numbers in their own units.

use std::path::Path;

use coxswain_data::{
    DataError, Role, inspect,
    lerobot::Catalog,
    preview::{Plot, Preview, Strip, spread},
};

use crate::{frames::Cameras, scan::Scanner};

/// Episode `number` of the data set at `dir`, with so many of its frames.
pub fn episode(dir: &Path, number: u64, frames: usize) -> Result<Preview, DataError> {
    let catalog = Catalog::open(dir)?;
    let len = catalog.info.episodes;
    let out_of_range = || DataError::OutOfRange { what: "episode", index: number, len };
    let of = usize::try_from(number).ok().and_then(|at| catalog.episodes.episodes.get(at));
    let of = of.ok_or_else(out_of_range)?;
    let frames = spread(of.length, frames);
    let cameras = Cameras::new(&catalog, 1)?;
    let strip = |camera: usize| -> Result<Strip, DataError> {
        let pictures = frames.iter().map(|frame| cameras.frame(camera, of.start + frame));
        let pictures = pictures.collect::<Result<Vec<_>, _>>()?;
        let size =
            pictures.first().map_or_else(String::new, |one| format!(", {} x {}", one.width, one.height));
        Ok(Strip { title: format!("{} as recorded{size}", cameras.cameras[camera].name), pictures })
    };
    let strips = (0..cameras.cameras.len()).map(strip).collect::<Result<_, _>>()?;
    let scanner = Scanner::new(&catalog);
    let described = inspect(dir)?.features;
    let is_plotted = |name: &str| {
        described
            .iter()
            .any(|feature| feature.name == name && matches!(feature.role, Role::Vector | Role::Action))
    };
    let plotted = scanner.features.iter().enumerate().filter(|(_, feature)| is_plotted(&feature.name));
    let plot = |(at, feature): (usize, &crate::scan::Numeric)| -> Result<Plot, DataError> {
        Ok(Plot { title: format!("{} as recorded", feature.name), series: scanner.series(number, at)? })
    };
    let plots = plotted.map(plot).collect::<Result<_, _>>()?;
    Ok(Preview { title: format!("episode {number}: {}", task(&catalog, of.start)), frames, strips, plots })
}

/// The task of the first frame; nothing where it has none.
fn task(catalog: &Catalog, sample: u64) -> String {
    use coxswain_data::lerobot::rows::{Columns, Limits, Part, RowStore};
    let rows = RowStore::new(Columns { numbers: Vec::new(), cameras: Vec::new() }, Limits::default());
    let text = catalog.episodes.of_sample(sample).and_then(|(_, episode)| {
        let block = rows.block(catalog, episode.file, episode.first_row, Part::Numbers).ok()?;
        let [_, _, task] = &block.keys;
        let task = *task.get((episode.first_row - block.first_row) as usize)?;
        catalog.tasks.get(&task).cloned()
    });
    text.unwrap_or_default()
}
