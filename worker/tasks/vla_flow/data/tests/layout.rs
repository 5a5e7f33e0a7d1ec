//! Where rows lie must not matter: several files and chunks, cameras, row groups, page sizes, windows and
//! cache sizes.

use crate::vla_flow::config::VlaSpec;
use coxswain_models::families::shelf;
use std::sync::Arc;

use coxswain_data::NormMode;
use parquet::basic::Compression;
use parquet::file::properties::{WriterProperties, WriterVersion};

use super::recording::{CHANNELS, Recording, WINDOW, action, sensor, state};
use crate::vla_flow::data::Dataset;
use coxswain_data::lerobot::{
    Catalog,
    rows::{Columns, Limits, Part, RowStore},
};

fn identity(recording: &Recording) -> (tempfile::TempDir, Dataset) {
    let dir = recording.write();
    let mut spec = recording.spec(dir.path());
    spec.vla_mut().data.normalization.state = NormMode::Identity;
    spec.vla_mut().data.normalization.action = NormMode::Identity;
    spec.vla_mut().data.normalization.sensor = NormMode::Identity;
    let dataset = Dataset::from_spec(&spec, shelf()).unwrap();
    (dir, dataset)
}

/// Every sample must hold what was recorded for its episode and frame.
fn check_all(dataset: &Dataset, recording: &Recording) {
    let mut index = 0;
    for (episode, (length, _)) in recording.episodes.iter().enumerate() {
        for frame in 0..*length {
            let sample = dataset.sample(index).unwrap();
            assert_eq!((sample.index, sample.episode, sample.frame), (index, episode as u64, frame as u64));
            assert_eq!(sample.state, state(episode, frame));
            assert_eq!(sample.sensor, sensor(episode, frame));
            let want: Vec<f32> = (0..4).flat_map(|h| action(episode, (frame + h).min(length - 1))).collect();
            assert_eq!(sample.actions, want);
            assert_eq!(sample.action_is_pad, [0, 1, 2, 3].map(|h| frame + h >= *length));
            // 30x40 pixels become 56x84, 28x28 become 56x56: at least four tokens each.
            assert_eq!(sample.image_shapes, [[1, 4, 6], [1, 4, 4]]);
            let shade = |camera: u64| ((index * 10 + camera) as f32 / 255.0 - 0.48145466) / 0.26862954;
            for (camera, first) in [(0, 0), (1, 4 * 6 * 1176)] {
                let got = sample.pixel_values[first];
                assert!((got - shade(camera)).abs() < 1e-5, "sample {index}, camera {camera}");
            }
            index += 1;
        }
    }
    assert_eq!(dataset.len(), index);
    assert!(dataset.sample(index).is_err());
}

#[test]
fn samples_are_found_across_files_chunks_and_cameras() {
    let recording = Recording::default();
    let (_dir, dataset) = identity(&recording);
    let dims = dataset.dims();
    assert_eq!((dims.sensor_window, dims.sensor_channels), (WINDOW, CHANNELS));
    check_all(&dataset, &recording);
}

#[test]
fn row_groups_and_pages_of_any_size_give_the_same_samples() {
    let small_pages = || WriterProperties::builder().set_write_batch_size(1).set_data_page_row_count_limit(2);
    for dictionary in [false, true] {
        for without_index in [false, true] {
            // The second version of pages, in one of the compressions: levels lie outside of what is
            // compressed.
            let (version, compression) = match dictionary == without_index {
                true => (WriterVersion::PARQUET_1_0, Compression::ZSTD(Default::default())),
                false => (WriterVersion::PARQUET_2_0, Compression::SNAPPY),
            };
            let properties = small_pages()
                .set_writer_version(version)
                .set_compression(compression)
                .set_dictionary_enabled(dictionary)
                .set_offset_index_disabled(without_index)
                .build();
            for group_per_episode in [false, true] {
                let recording =
                    Recording { properties: properties.clone(), group_per_episode, ..Default::default() };
                let (_dir, dataset) = identity(&recording);
                check_all(&dataset, &recording);
            }
        }
    }
}

#[test]
fn windows_and_caches_of_any_size_give_the_same_rows_within_their_bounds() {
    let recording = Recording { group_per_episode: false, ..Default::default() };
    let dir = recording.write();
    let catalog = Catalog::open(dir.path()).unwrap();
    let columns = Columns {
        numbers: vec![("action".into(), vec![2]), ("observation.sensor".into(), vec![WINDOW, CHANNELS])],
        cameras: vec!["observation.images.wrist".into()],
    };
    let read = |limits: Limits| -> Vec<(Vec<f32>, Vec<u8>)> {
        let store = RowStore::new(columns.clone(), limits);
        let mut rows = Vec::new();
        for index in 0..17 {
            let (_, episode) = catalog.episodes.of_sample(index).unwrap();
            let row = episode.first_row + index - episode.start;
            let numbers = store.block(&catalog, episode.file, row, Part::Numbers).unwrap();
            let at = (row - numbers.first_row) as usize;
            let values: Vec<f32> = [2, WINDOW * CHANNELS]
                .iter()
                .zip(&numbers.numbers)
                .flat_map(|(width, column)| column[at * width..(at + 1) * width].to_vec())
                .collect();
            let block = store.block(&catalog, episode.file, row, Part::Camera(0)).unwrap();
            rows.push((values, block.image(row).unwrap().to_vec()));
            assert!(store.cached_bytes() <= limits.cache_bytes);
        }
        rows
    };
    let whole = read(Limits::default());
    for block_bytes in [1, 200, 1000] {
        for cache_bytes in [0, 500, 1 << 20] {
            assert_eq!(
                read(Limits { cache_bytes, block_bytes, footers: 1 }),
                whole,
                "{block_bytes} {cache_bytes}"
            );
        }
    }
}

#[test]
fn a_window_is_as_large_as_its_images_are_and_not_as_the_footer_says() {
    let recording = Recording { episodes: vec![(200, 0)], still: true, ..Default::default() };
    let dir = recording.write();
    let catalog = Catalog::open(dir.path()).unwrap();
    let columns = Columns { numbers: Vec::new(), cameras: vec!["observation.images.front".into()] };
    let block_bytes = 100;
    let store = RowStore::new(columns, Limits { cache_bytes: 1 << 20, block_bytes, footers: 1 });
    for row in 0..200 {
        let block = store.block(&catalog, 0, row, Part::Camera(0)).unwrap();
        assert!(block.holds(row) && block.image(row).is_some(), "row {row}");
        let rows = (block.first_row..).take(block.rows);
        let bytes: usize = rows.filter_map(|row| block.image(row)).map(<[u8]>::len).sum();
        assert!(block.rows == 1 || bytes as u64 <= 4 * block_bytes, "{} rows of {bytes} bytes", block.rows);
    }
}

#[test]
fn threads_reading_at_once_read_the_same_samples() {
    let recording = Recording::default();
    let (_dir, dataset) = identity(&recording);
    let dataset = Arc::new(dataset);
    let want: Vec<_> = (0..17).map(|i| dataset.sample(i).unwrap()).collect();
    let read = |shift: u64| {
        let dataset = dataset.clone();
        let want = want.clone();
        std::thread::spawn(move || {
            for i in 0..170 {
                let index = (i * 7 + shift) % 17;
                assert_eq!(dataset.sample(index).unwrap(), want[index as usize]);
            }
        })
    };
    let threads: Vec<_> = (0..4).map(read).collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
}

#[test]
fn held_out_episodes_are_not_trained_on_and_are_listed() {
    let recording = Recording::default();
    let dir = recording.write();
    let mut spec = recording.spec(dir.path());
    spec.data.holdout_episodes = vec![3, 1];
    let dataset = Dataset::from_spec(&spec, shelf()).unwrap();
    assert_eq!(dataset.training_len(), 12);
    assert_eq!(dataset.holdout().collect::<Vec<_>>(), [5, 13, 14, 15, 16]);
    let order = dataset.order();
    let mut trained: Vec<u64> = (0..12).filter_map(|p| order.sample(0, p)).collect();
    trained.sort_unstable();
    assert_eq!(trained, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12]);
}

#[test]
fn the_fingerprint_follows_the_content_and_not_the_path() {
    let recording = Recording::default();
    let fingerprint = |r: &Recording| {
        let dir = r.write();
        (Catalog::open(dir.path()).unwrap().fingerprint, dir)
    };
    let (a, _dir_a) = fingerprint(&recording);
    let (b, dir_b) = fingerprint(&recording);
    assert_eq!(a, b);
    super::recording::edit(dir_b.path(), "meta/stats.json", |s| s["action"]["mean"][0] = 1.25.into());
    assert_ne!(Catalog::open(dir_b.path()).unwrap().fingerprint, a);
    let longer = Recording { episodes: vec![(5, 0), (2, 0), (7, 1), (4, 2)], ..recording };
    assert_ne!(fingerprint(&longer).0, a);
}

#[test]
fn normalisation_is_lerobot_s_formula_in_every_mode() {
    let recording = Recording::default();
    let dir = recording.write();
    let mut spec = recording.spec(dir.path());
    let x = action(2, 1)[0];
    // mean 1, std 2; min -4, max 4; q01 -2, q99 2.
    let cases = [
        (NormMode::Identity, x),
        (NormMode::MeanStd, (x - 1.0) / (2.0 + 1e-8)),
        (NormMode::MinMax, 2.0 * (x + 4.0) / 8.0 - 1.0),
        (NormMode::Quantiles, 2.0 * (x + 2.0) / 4.0 - 1.0),
        (NormMode::Quantile10, 2.0 * (x + 1.0) / 4.0 - 1.0),
    ];
    for (mode, want) in cases {
        spec.vla_mut().data.normalization.action = mode;
        let dataset = Dataset::from_spec(&spec, shelf()).unwrap();
        let mut actions = dataset.sample(7).unwrap().actions;
        assert_eq!(actions[0], want, "{mode:?}");
        dataset.denormalize_actions(&mut actions);
        assert!((actions[0] - x).abs() < 1e-5, "{mode:?}");
    }
}

#[test]
fn a_feature_that_never_moves_is_normalised_without_infinities() {
    let recording = Recording::default();
    let dir = recording.write();
    super::recording::edit(dir.path(), "meta/stats.json", |s| {
        for (low, high) in [("min", "max"), ("q01", "q99")] {
            s["action"][low] = serde_json::json!([3.0, 3.0]);
            s["action"][high] = serde_json::json!([3.0, 3.0]);
        }
        s["action"]["std"] = serde_json::json!([0.0, 0.0]);
    });
    for mode in [
        NormMode::MeanStd,
        NormMode::MinMax,
        NormMode::MinMaxClamped,
        NormMode::Quantiles,
        NormMode::Quantile10,
    ] {
        let mut spec = recording.spec(dir.path());
        spec.vla_mut().data.normalization.action = mode;
        let sample = Dataset::from_spec(&spec, shelf()).unwrap().sample(7).unwrap();
        assert!(sample.actions.iter().all(|a| a.is_finite()), "{mode:?}: {:?}", sample.actions);
    }
}
