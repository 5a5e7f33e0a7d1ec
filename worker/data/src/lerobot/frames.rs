//! Frames out of videos, at random, in bounded memory.
//!
//! ```text
//! sample ── episode ── span: video, seconds ── the video's table: number of the episode's first frame
//!    └───── frame of the episode ───────────────────────────────┴──▶ number in the table ──▶ decoder ──▶ RGB
//! ```
//!
//! A video's table is read once and kept, up to a limit of bytes; decoders are shared by the threads that
//! read samples. A frame costs decoding from the keyframe before it; a decoder that stands between the two
//! goes on from there.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use coxswain_video::{Codec, Counts, DecoderPool, Fault, Moov, Picture, Rotation, Source, Video, VideoIndex};

use super::cache::{Lru, lock};
use super::catalog::Catalog;
use super::feature::Feature;
use super::videos::{Span, VideoTable};
use crate::{
    error::DataError,
    orientation::Orientation,
    pixels::Pixels,
    place::{self, Content},
};

/// Decoders kept open for each camera: those of a few threads, which go through the frames of neighbouring
/// samples.
const DECODERS: usize = 3;
/// Videos that are asked whether theirs is the size that one has not.
const OTHERS: usize = 8;
/// Tables of videos kept: those of two million frames.
const TABLE_BYTES: usize = 64 << 20;
/// What a video takes beside its table: its path, and its place in the cache.
const VIDEO_BYTES: usize = 1 << 10;
/// Frames in 4:2:0 that a decoder keeps, with what it notes of each.
const FRAMES_OF_DECODER: u64 = 12;

/// Reads frames of a data set's videos.
pub struct FrameStore {
    cameras: Vec<Camera>,
    /// By camera and file.
    videos: Mutex<Lru<(usize, u32), Video>>,
    decoders: DecoderPool,
}

struct Camera {
    /// Place among the videos of the catalog.
    table: usize,
    /// Height and width, as `info.json` has them.
    size: (usize, usize),
}

impl FrameStore {
    /// A store of the frames of these video features. Reads nothing yet.
    pub fn new(catalog: &Catalog, cameras: &[&str]) -> Result<Self, DataError> {
        let camera = |name: &&str| {
            let table = catalog.videos.iter().position(|table| table.camera == **name);
            let size = catalog.info.feature(name).and_then(Feature::image_size);
            let camera = table.zip(size).map(|(table, size)| Camera { table, size });
            camera.ok_or_else(|| {
                let remedy = "a video needs dtype `video` and a shape of height, width and channels";
                DataError::invalid(&catalog.info.path, format!("features.{name}"), "not a video", remedy)
            })
        };
        let cameras = cameras.iter().map(camera).collect::<Result<Vec<_>, _>>()?;
        let (videos, decoders) =
            (Mutex::new(Lru::new(TABLE_BYTES)), DecoderPool::new(DECODERS * cameras.len()));
        Ok(Self { cameras, videos, decoders })
    }

    /// Bytes that a store takes at most: cameras of these heights and widths, each of so many frames in all
    /// its videos.
    pub fn bytes(sizes: &[(usize, usize)], frames: u64) -> u64 {
        let tables = (32 * frames * sizes.len() as u64).min(TABLE_BYTES as u64);
        let pixels: u64 = sizes.iter().map(|(height, width)| (height * width) as u64).sum();
        tables + DECODERS as u64 * FRAMES_OF_DECODER * pixels * 3 / 2
    }

    /// All videos of all cameras: the camera's place among those that were given, and the file's in its
    /// table.
    pub fn files(&self, catalog: &Catalog) -> impl Iterator<Item = (usize, u32)> {
        let counts: Vec<_> =
            (0..self.cameras.len()).map(|n| self.table(catalog, n).files.len() as u32).collect();
        counts.into_iter().enumerate().flat_map(|(camera, files)| (0..files).map(move |file| (camera, file)))
    }

    /// The files of a camera.
    pub fn table<'a>(&self, catalog: &'a Catalog, camera: usize) -> &'a VideoTable {
        &catalog.videos[self.cameras[camera].table]
    }

    /// How many cameras it reads.
    pub fn cameras(&self) -> usize {
        self.cameras.len()
    }

    /// Reads the table of video `file` of a camera and checks it against the episode table, as far as these
    /// episodes are in it. Decodes nothing.
    pub fn check_file(
        &self,
        catalog: &Catalog,
        camera: usize,
        file: u32,
        is_read: &dyn Fn(u64) -> bool,
    ) -> Result<(), DataError> {
        let video = self.video(catalog, camera, file)?;
        let table = self.table(catalog, camera);
        let mut episodes = table.episodes_of(file).filter(|episode| is_read(*episode));
        episodes.try_for_each(|episode| self.first(catalog, &video, table, episode).map(drop))
    }

    /// What decodes a camera's first video, and how many frames a keyframe has to serve there at most.
    pub fn coding(&self, catalog: &Catalog, camera: usize) -> Result<(Codec, usize), DataError> {
        let video = self.video(catalog, camera, 0)?;
        Ok((video.index().codec, video.index().longest_group()))
    }

    /// What a camera shows in sample `index`.
    pub fn frame(&self, catalog: &Catalog, camera: usize, index: u64) -> Result<Pixels, DataError> {
        let (number, episode) = (catalog.episodes.of_sample(index)).ok_or(DataError::OutOfRange {
            what: "sample",
            index,
            len: catalog.episodes.frames(),
        })?;
        let table = self.table(catalog, camera);
        let span = span_of(table, number)?;
        let video = self.video(catalog, camera, span.file)?;
        let frame = index - episode.start;
        let shown = self.first(catalog, &video, table, number)? + frame as usize;
        bring(&video, shown)?;
        let mut decoded = None;
        self.decoders
            .decode(&video, &[shown], &mut |_, picture| decoded = Some(picture.map(Picture::to_rgb)));
        let damaged = |fault: String| DataError::Sample {
            path: video.path().to_path_buf(),
            index,
            episode: number,
            frame,
            feature: table.camera.clone(),
            fault: format!("frame {shown} of the video: {fault}"),
        };
        let rgb = match decoded {
            Some(Ok(rgb)) => rgb,
            Some(Err(error)) => return Err(damaged(error.fault.to_string())),
            None => return Err(damaged("the decoder returned no frame".into())),
        };
        let VideoIndex { height, width, .. } = *video.index();
        Ok(orientation(video.index()).apply(Pixels { height, width, rgb }))
    }

    /// What its decoders have done so far.
    pub fn counts(&self) -> Counts {
        self.decoders.counts()
    }

    /// Brings what [`FrameStore::frame`] reads from its file, where that is far away. Decodes nothing.
    pub fn bring(&self, catalog: &Catalog, camera: usize, index: u64) -> Result<(), DataError> {
        let table = self.table(catalog, camera);
        let Some((number, episode)) = catalog.episodes.of_sample(index) else { return Ok(()) };
        let video = self.video(catalog, camera, span_of(table, number)?.file)?;
        let first = self.first(catalog, &video, table, number)?;
        bring(&video, first + (index - episode.start) as usize)
    }

    /// Which video holds an episode, and how many seconds from its beginning.
    pub fn place(&self, catalog: &Catalog, camera: usize, episode: u64) -> Result<(PathBuf, f64), DataError> {
        let table = self.table(catalog, camera);
        let Span { file, from } = span_of(table, episode)?;
        Ok((catalog.video_path(table, file)?, from))
    }

    /// Opens a video, or finds it open.
    fn video(&self, catalog: &Catalog, camera: usize, file: u32) -> Result<Arc<Video>, DataError> {
        if let Some(video) = lock(&self.videos).get(&(camera, file)) {
            return Ok(video);
        }
        let table = self.table(catalog, camera);
        let (name, path) = (&table.camera, catalog.video_path(table, file)?);
        // Read outside the lock: two threads may read the same table, which is only wasted work.
        let video = opened(&path).map_err(|unusable| match unusable {
            Unusable::Place(error) => error,
            Unusable::Video(fault) => DataError::Video { path: path.clone(), camera: name.clone(), fault },
        })?;
        self.check_size(catalog, camera, file, &video)?;
        let weight = video.index().bytes() + VIDEO_BYTES;
        let video = Arc::new(video);
        lock(&self.videos).put((camera, file), video.clone(), weight);
        Ok(video)
    }

    /// A video's pictures have the size that `info.json` says. Where they have not, the video is to blame if
    /// another one's have.
    fn check_size(
        &self,
        catalog: &Catalog,
        camera: usize,
        file: u32,
        video: &Video,
    ) -> Result<(), DataError> {
        let (table, (height, width)) = (self.table(catalog, camera), self.cameras[camera].size);
        let size = |video: &Video| orientation(video.index()).size(video.index().height, video.index().width);
        let (path, name, found) = (video.path(), &table.camera, size(video));
        if found == (height, width) {
            return Ok(());
        }
        let (seen, stated) = (format!("{}x{}", found.0, found.1), format!("{height}x{width}"));
        let other = |file: u32| Some(size(&opened(&catalog.video_path(table, file).ok()?).ok()?));
        let mut others = (0..table.files.len() as u32).filter(|other| *other != file).take(OTHERS);
        if others.any(|file| other(file) == Some((height, width))) {
            let found =
                format!("frames of {seen} (height x width), but info.json and other videos have {stated}");
            let remedy = format!(
                "leave its episodes out with `data.exclude_episodes: [{}]`, or re-encode it: `ffmpeg -i IN.mp4 -vf \
                 scale={width}:{height} -c:v libx264 -pix_fmt yuv420p -g 2 OUT.mp4`",
                table.listed(file)
            );
            return Err(DataError::invalid(path, name, found, remedy));
        }
        let found = format!("{stated} (height x width), but the frames of {} are {seen}", path.display());
        let remedy = "correct the feature's shape; `names`, if given, says which axis is the channel";
        Err(DataError::invalid(&catalog.info.path, format!("features.{name}.shape"), found, remedy))
    }

    /// The number of an episode's first frame in its video, which has all frames of the episode.
    fn first(
        &self,
        catalog: &Catalog,
        video: &Video,
        table: &VideoTable,
        episode: u64,
    ) -> Result<usize, DataError> {
        let length = catalog.episodes.episodes[episode as usize].length as usize;
        let located = locate(video.index(), span_of(table, episode)?.from, length, catalog.info.fps);
        located.map_err(|found| {
            let remedy = format!(
                "metadata and video are of different recordings: restore the one that is wrong, or leave the \
                 episode out with `data.exclude_episodes: [{episode}]`"
            );
            DataError::invalid(video.path(), format!("{}, episode {episode}", table.camera), found, remedy)
        })
    }
}

/// Which way up a video's pictures are seen.
fn orientation(index: &VideoIndex) -> Orientation {
    match index.rotation {
        Rotation::None => Orientation::UPRIGHT,
        Rotation::Right => Orientation::RIGHT,
        Rotation::Half => Orientation::HALF,
        Rotation::Left => Orientation::LEFT,
    }
}

/// Why a video cannot be opened.
enum Unusable {
    Place(DataError),
    Video(Fault),
}

/// A video with its table read, wherever it lies.
fn opened(path: &Path) -> Result<Video, Unusable> {
    if !place::is_remote(path) {
        return Video::open(path).map_err(|error| Unusable::Video(error.fault));
    }
    let content = RemoteVideo(place::open(path).map_err(Unusable::Place)?);
    let len = content.0.len();
    // The table is at one end of the file or at the other.
    content.0.bring(&[0..len.min(1), len.saturating_sub(1)..len]).map_err(Unusable::Place)?;
    let moov = Moov::read(&content).map_err(Unusable::Video)?;
    Video::with(path, Box::new(content), &moov, 0).map_err(|error| Unusable::Video(error.fault))
}

/// Brings what decoding frame `shown` reads: everything from its keyframe on.
fn bring(video: &Video, shown: usize) -> Result<(), DataError> {
    if !place::is_remote(video.path()) {
        return Ok(());
    }
    let (index, content) = (video.index(), place::open(video.path())?);
    let Some(sample) = index.sample_of(shown) else { return Ok(()) };
    let samples = index.samples().get(index.samples()[sample as usize].start as usize..=sample as usize);
    let spans = samples.unwrap_or_default().iter();
    content.bring(&spans.map(|of| of.offset..of.offset + u64::from(of.size)).collect::<Vec<_>>())
}

/// A video's bytes that are no file of this machine.
struct RemoteVideo(Arc<dyn Content>);

impl Source for RemoteVideo {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        self.0.read_at(offset, buffer).map_err(|error| Fault::Io(error.to_string()))
    }
}

fn span_of(table: &VideoTable, episode: u64) -> Result<Span, DataError> {
    table.span(episode).ok_or(DataError::OutOfRange { what: "episode", index: episode, len: 0 })
}

/// The first of `length` frames that begin `from` seconds into a video: the nearest one. First and last must
/// stand where they are expected, give or take half a frame.
fn locate(index: &VideoIndex, from: f64, length: usize, fps: f64) -> Result<usize, String> {
    let first = index.frame_at(from);
    let last = first + length - 1;
    if last >= index.frames() {
        return Err(format!(
            "its {length} frames begin at frame {first} ({from} s), but the video has only {} frames",
            index.frames()
        ));
    }
    for (frame, after) in [(first, 0), (last, length - 1)] {
        let (expected, found) = (from + after as f64 / fps, index.seconds(frame).unwrap_or(f64::NAN));
        let is_there = (found - expected).abs() <= 0.5 / fps;
        if !is_there {
            return Err(format!(
                "frame {after} is expected at {expected:.3} s of the video, at {fps} frames a second, but \
                 the nearest is at {found:.3} s"
            ));
        }
    }
    Ok(first)
}
