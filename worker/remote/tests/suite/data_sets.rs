//! Data sets behind a web server are those of the disk: the same fingerprint, rows and frames.

use std::path::Path;

use coxswain_data::lerobot::{
    Catalog,
    rows::{Columns, Limits, Part, RowStore},
};

use super::{
    cache,
    server::Server,
    sets::{Layout, V21, V30, open, rgb_crcs},
};

fn both(dir: &Path) -> (Catalog, Catalog, Server) {
    cache();
    coxswain_remote::install();
    let server = Server::files(dir);
    let far = Catalog::open(Path::new(&server.url())).unwrap_or_else(|error| panic!("{error}"));
    (Catalog::open(dir).unwrap(), far, server)
}

#[test]
fn frames_of_videos_are_those_of_the_disk_in_both_layouts() {
    for layout in [V30, V21] {
        let Layout { version, .. } = layout;
        let dir = layout.write();
        let (near, far, server) = both(dir.path());
        assert_eq!((near.fingerprint, near.video_bytes), (far.fingerprint, far.video_bytes), "{version}");
        let (_, store) = open(Path::new(&server.url()));
        for index in 0..far.episodes.frames() {
            for (camera, (file, frame)) in layout.samples()[index as usize].into_iter().enumerate() {
                store.bring(&far, camera, index).unwrap();
                let pixels = store.frame(&far, camera, index).unwrap();
                assert_eq!(crc32fast::hash(&pixels.rgb), rgb_crcs(file)[frame], "{version} {index} {file}");
            }
        }
    }
}

#[test]
fn rows_are_those_of_the_disk() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/assets/metaworld-mini");
    let (near, far, _server) = both(&dir);
    assert_eq!(near.fingerprint, far.fingerprint);
    let columns = || Columns {
        numbers: vec![("action".into(), vec![4])],
        cameras: vec!["observation.images.corner2".into()],
    };
    let [of_disk, of_server] = [(); 2].map(|()| RowStore::new(columns(), Limits::default()));
    for row in (0..near.episodes.files[0].rows).step_by(7) {
        of_server.bring(&far, 0, row, Part::Camera(0)).unwrap();
        for part in [Part::Numbers, Part::Camera(0)] {
            let [one, other] = [(&of_disk, &near), (&of_server, &far)]
                .map(|(store, of)| store.block(of, 0, row, part).unwrap());
            assert_eq!((&one.numbers, &one.keys), (&other.numbers, &other.keys), "row {row}");
            assert_eq!(one.image(row), other.image(row), "row {row}");
        }
    }
}

#[test]
fn what_a_run_saw_first_is_what_later_processes_must_find() {
    let dir = V30.write();
    let (_, _far, server) = both(dir.path());
    let run = tempfile::tempdir().unwrap();
    let file = run.path().join("objects-0.txt");
    let root = server.url();
    let pin = || coxswain_data::place::pin(Path::new(&root), &file);
    pin().and_then(|()| pin()).unwrap_or_else(|error| panic!("{error}"));
    // As if another process had been first, and had seen another version.
    let text = std::fs::read_to_string(&file).unwrap();
    let line = text.lines().find(|line| line.ends_with("file-001.mp4")).expect("videos are listed");
    std::fs::write(&file, text.replace(line, &line.replace('"', "'"))).unwrap();
    let error = pin().unwrap_err().to_string();
    let parts = ["videos/observation.images.front/chunk-000/file-001.mp4", "is no longer the same object"];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
}
