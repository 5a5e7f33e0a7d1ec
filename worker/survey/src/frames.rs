//! Pictures of an episode, decoded: whether they can be, and their colours.

use coxswain_data::{
    DataError,
    lerobot::{
        Catalog,
        feature::Feature,
        frames::FrameStore,
        rows::{Columns, Limits, Part, RowStore},
    },
    pictures,
    pixels::Pixels,
};

use crate::findings::Finding;
use crate::moments::{Dim, Histogram, Moments};

/// Which frames of an episode are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frames {
    /// The first, the middle and the last.
    Few,
    /// As many as LeRobot takes for statistics: at most `max(100, min(n^0.75, 10000))` of n, evenly spread.
    Sampled,
    /// All.
    Every,
}

impl Frames {
    /// Numbers in an episode of so many, in order.
    pub fn of(self, length: u64) -> Vec<u64> {
        let last = length.saturating_sub(1);
        match self {
            Self::Every => (0..length).collect(),
            Self::Few => {
                let mut few = vec![0, last / 2, last];
                few.dedup();
                few
            }
            Self::Sampled => {
                let wanted = ((length as f64).powf(0.75) as u64).min(10_000).max(length.min(100));
                let step = last as f64 / (wanted.max(2) - 1) as f64;
                (0..wanted).map(|n| (n as f64 * step).round_ties_even() as u64).collect()
            }
        }
    }
}

/// A camera of a data set.
pub struct Camera {
    /// Feature.
    pub name: String,
    /// Height and width, as `info.json` has them.
    size: Option<(usize, usize)>,
    stored: FrameStorage,
}

enum FrameStorage {
    Images(usize),
    Video(usize),
}

/// Reads pictures, from many threads.
pub struct Cameras<'a> {
    catalog: &'a Catalog,
    /// All of the data set but depth maps, which are not decoded.
    pub cameras: Vec<Camera>,
    rows: RowStore,
    /// One for each thread: a store's decoders are for a few readers.
    videos: Vec<FrameStore>,
}

impl<'a> Cameras<'a> {
    /// The cameras of a data set, for so many threads.
    pub fn new(catalog: &'a Catalog, threads: usize) -> Result<Self, DataError> {
        let (mut images, mut videos) = (Vec::new(), Vec::new());
        let of = |(name, feature): &(String, Feature)| {
            let stored = if feature.is_video() {
                videos.push(name.clone());
                FrameStorage::Video(videos.len() - 1)
            } else {
                images.push(name.clone());
                FrameStorage::Images(images.len() - 1)
            };
            Camera { name: name.clone(), size: feature.image_size(), stored }
        };
        let features = catalog.info.features.iter().filter(|(_, feature)| feature.is_camera());
        let cameras = features.map(of).collect();
        let names: Vec<&str> = videos.iter().map(String::as_str).collect();
        let stores = (0..threads.max(1)).map(|_| FrameStore::new(catalog, &names));
        let videos = stores.collect::<Result<_, _>>()?;
        let rows = RowStore::new(Columns { numbers: Vec::new(), cameras: images }, Limits::default());
        Ok(Self { catalog, cameras, rows, videos })
    }

    /// What is wrong with videos, a file at a time, without decoding any frame.
    pub fn check_files(&self) -> Vec<Finding> {
        let store = &self.videos[0];
        let wrong = |(camera, file)| store.check_file(self.catalog, camera, file, &|_| true).err();
        let wrong = store.files(self.catalog).filter_map(wrong);
        wrong.map(|error| Finding::of(&error, &self.catalog.root, "video")).collect()
    }

    /// The file of a camera that is stored as video in which an episode is, relative to the data set.
    pub fn video(&self, camera: usize, episode: u64) -> Option<String> {
        let FrameStorage::Video(video) = self.cameras[camera].stored else { return None };
        let (path, _) = self.videos[0].place(self.catalog, video, episode).ok()?;
        Some(path.strip_prefix(&self.catalog.root).unwrap_or(&path).display().to_string())
    }

    /// Whether data files have this data set's columns of images.
    pub fn check_file(&self, file: u32) -> Result<(), DataError> {
        self.rows.check_file(self.catalog, file)
    }

    /// Decodes frames of an episode. The colours of those that could be, and what is wrong with the others.
    pub fn look(&self, camera: usize, episode: u64, frames: &[u64]) -> (Colours, Vec<Finding>) {
        let (mut colours, mut findings) = (Colours::default(), Vec::<Finding>::new());
        let start = self.catalog.episodes.episodes[episode as usize].start;
        for frame in frames {
            match self.frame(camera, start + frame) {
                Ok(pixels) => colours.add_picture(&pixels),
                Err(error) => {
                    let finding = Finding::of(&error, &self.catalog.root, "unreadable");
                    let same = |one: &&mut Finding| one.file == finding.file;
                    match findings.iter_mut().find(same) {
                        Some(first) => first.more += 1,
                        None => findings.push(finding),
                    }
                }
            }
        }
        (colours, findings)
    }

    /// What a camera shows in sample `index`.
    pub fn frame(&self, camera: usize, index: u64) -> Result<Pixels, DataError> {
        let Camera { name, size, stored } = &self.cameras[camera];
        match *stored {
            FrameStorage::Video(video) => {
                let thread = rayon::current_thread_index().unwrap_or(0) % self.videos.len();
                self.videos[thread].frame(self.catalog, video, index)
            }
            FrameStorage::Images(column) => {
                let (_, episode) = self.catalog.episodes.of_sample(index).ok_or_else(|| {
                    let len = self.catalog.episodes.frames();
                    DataError::OutOfRange { what: "sample", index, len }
                })?;
                let row = episode.first_row + index - episode.start;
                let block = self.rows.block(self.catalog, episode.file, row, Part::Camera(column))?;
                let wrong = |fault| self.catalog.row_error(episode.file, row, name, fault);
                let missing = "no image bytes in the row; re-export with images embedded in parquet";
                let encoded = block.image(row).ok_or_else(|| wrong(missing.into()))?;
                let pixels =
                    coxswain_data::surviving::surviving(|| pictures::decode(encoded).map_err(wrong), wrong)?;
                match *size {
                    Some((height, width)) if (height, width) != (pixels.height, pixels.width) => {
                        Err(wrong(format!(
                            "the image is {}x{} (height x width), but info.json says {height}x{width}; \
                             correct the feature's shape or re-export",
                            pixels.height, pixels.width
                        )))
                    }
                    _ => Ok(pixels),
                }
            }
        }
    }
}

/// How often each value of a byte is there, by channel.
pub struct Colours {
    /// Pictures.
    pub pictures: u64,
    counts: Box<[[u64; 256]; 3]>,
}

impl Default for Colours {
    fn default() -> Self {
        Self { pictures: 0, counts: Box::new([[0; 256]; 3]) }
    }
}

/// From this size on LeRobot leaves out pixels for statistics, until the longer side has about 150.
const LARGE: usize = 300;
const REDUCED: usize = 150;

impl Colours {
    fn add_picture(&mut self, picture: &Pixels) {
        let Pixels { height, width, rgb } = picture;
        let longer = (*height).max(*width);
        let step = if longer < LARGE { 1 } else { longer / REDUCED };
        for row in rgb.chunks_exact((3 * width).max(1)).step_by(step) {
            for pixel in row.chunks_exact(3).step_by(step) {
                for (counts, value) in self.counts.iter_mut().zip(pixel) {
                    counts[usize::from(*value)] += 1;
                }
            }
        }
        self.pictures += 1;
    }

    /// Whether all pixels have one colour: a camera that was covered, or off.
    pub fn is_plain(&self) -> bool {
        let values = |counts: &[u64; 256]| counts.iter().filter(|count| **count > 0).count();
        self.pictures > 0 && self.counts.iter().all(|counts| values(counts) == 1)
    }

    /// By channel, of values from 0 to 255.
    pub fn dims(&self) -> Vec<Dim> {
        let channel = |counts: &[u64; 256]| {
            let there = || counts.iter().enumerate().filter(|(_, count)| **count > 0);
            let mut moments = Moments::default();
            there().for_each(|(value, count)| moments.add_values(value as f64, *count, 0));
            let mut spread = Histogram::new(&moments);
            there().for_each(|(value, count)| spread.add_values(value as f64, *count));
            Dim::new(moments, Some(&spread))
        };
        self.counts.iter().map(channel).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_sampled_as_lerobot_does() {
        // numpy: np.round(np.linspace(0, n - 1, estimate_num_samples(n))).astype(int)
        assert_eq!(Frames::Sampled.of(5), [0, 1, 2, 3, 4]);
        assert_eq!(Frames::Sampled.of(1), [0]);
        let of_1000 = Frames::Sampled.of(1000);
        assert_eq!((of_1000.len(), &of_1000[..4], of_1000[176]), (177, &[0, 6, 11, 17][..], 999));
        assert_eq!(Frames::Sampled.of(100_000_000).len(), 10_000);
        assert_eq!((Frames::Few.of(1), Frames::Few.of(9)), (vec![0], vec![0, 4, 8]));
    }
}
