//! Tar shards as tests write them.

use std::{fs::File, path::Path};

use tar::{Builder, Header};

/// Writes a shard of these members: names and contents.
pub fn pack<'a>(path: &Path, members: impl IntoIterator<Item = (String, &'a [u8])>) {
    let mut tar = Builder::new(File::create(path).expect("a file"));
    for (name, content) in members {
        let mut header = Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, content).expect("it is written");
    }
    tar.finish().expect("it is written");
}
