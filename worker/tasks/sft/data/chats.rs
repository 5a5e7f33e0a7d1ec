//! A file of chats as a run sees it: which of them train, and each as ids and patches.
//!
//! [`Chats::open`] reads every line and looks for every image, so that what people can mend is said before
//! anything starts. What only shows when a chat is encoded (an image that does not decode, a token beyond the
//! vocabulary) is the chat's own fault: the run goes on without it.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::{DataError, Fingerprint, TrainingSamples, surviving::surviving};
use coxswain_proto::{ids::Step, order::DamagedRow, run_spec::RunSpec};
use coxswain_task::{Batch, Sample, Samples};

use super::{
    batch::{ChatBatch, ChatSample},
    reader::ChatReader,
    spelling::Chat,
};
use crate::{
    holdout::Holdout,
    settings::checked,
    sft::config::{ChatData, SftSettings},
    tokens::lines::Lines,
};

/// An opened file of chats. Shared between threads.
pub struct Chats {
    lines: Lines,
    fingerprint: Fingerprint,
    reader: ChatReader,
    /// Where relative paths of images begin.
    beside: PathBuf,
    max_tokens: usize,
    holdout: Holdout,
}

impl Chats {
    /// Opens the run's file, and what samples are made with.
    pub fn open(spec: &RunSpec) -> Result<Self, DataError> {
        let settings = checked(SftSettings::of(spec))?;
        let path = Path::new(&spec.data.path);
        let beside = beside(path, &settings.data);
        let mut sizes = Vec::new();
        let lines = Lines::scan(path, |number, text| {
            let refuse = |fault| DataError::Line { path: path.into(), line: number, fault };
            for image in Chat::parse(text).map_err(refuse)?.images {
                let image = beside.join(image);
                let file = fs::metadata(&image).ok().filter(fs::Metadata::is_file);
                let file = file.ok_or_else(|| {
                    let remedy = "correct the path, or set data.images to where paths begin";
                    refuse(format!("there is no image {}; {remedy}", image.display()))
                })?;
                sizes.push(file.len());
            }
            Ok(())
        })?;
        let fingerprint = fingerprint(&lines, &sizes);
        let holdout =
            Holdout::of(path, "chat", "write one chat a line", lines.len(), settings.data.holdout_every)?;
        Ok(Self {
            reader: ChatReader::open(&settings)?,
            lines,
            fingerprint,
            beside,
            max_tokens: settings.data.max_tokens,
            holdout,
        })
    }

    /// Chats, held-out ones included.
    pub fn len(&self) -> u64 {
        self.lines.len()
    }

    /// Never true: opening refuses an empty file.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Chat `index`, as training sees it.
    pub fn sample(&self, index: u64) -> Result<ChatSample, DataError> {
        let line = self.lines.read(index)?;
        let refuse = |fault| self.fault(index, fault);
        surviving(|| self.encoded(index, &line).map_err(refuse), refuse)
    }

    fn encoded(&self, index: u64, line: &str) -> Result<ChatSample, String> {
        self.cut(self.reader.chat(index, &Chat::parse(line)?, &self.beside)?)
    }

    /// A chat that is too long, without its end; refused if an image or the whole answer would go with it.
    fn cut(&self, mut sample: ChatSample) -> Result<ChatSample, String> {
        let (len, most) = (sample.input_ids.len(), self.max_tokens);
        if len > most {
            let image = self.reader.encoder().image_token();
            if sample.input_ids[most..].contains(&image) {
                return Err(format!(
                    "has {len} tokens, and an image lies beyond data.max_tokens ({most}); raise it, or lower data.max_pixels"
                ));
            }
            sample.input_ids.truncate(most);
            sample.learned.truncate(most);
        }
        // The first token is predicted from nothing.
        match sample.learned.iter().skip(1).any(|learned| *learned) {
            true => Ok(sample),
            false => Err(format!(
                "has no answer within its first {most} tokens (it has {len}); raise data.max_tokens or remove the line"
            )),
        }
    }

    fn fault(&self, index: u64, fault: String) -> DataError {
        DataError::Line { path: self.lines.path().into(), line: self.lines.number(index), fault }
    }
}

/// Names the lines and their images, which may lie anywhere. Of images it has the sizes: opening looks for
/// every one of them anyway, and reading them all on every rank would take as long as an epoch's decoding.
fn fingerprint(lines: &Lines, sizes: &[u64]) -> Fingerprint {
    if sizes.is_empty() {
        return lines.fingerprint();
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(&lines.fingerprint().0);
    sizes.iter().for_each(|size| {
        hasher.update(&size.to_le_bytes());
    });
    Fingerprint(*hasher.finalize().as_bytes())
}

/// Where relative paths of images begin.
pub(super) fn beside(path: &Path, data: &ChatData) -> PathBuf {
    let beside = data.images.as_ref().map(PathBuf::from);
    beside.unwrap_or_else(|| path.parent().unwrap_or(Path::new("")).into())
}

impl Samples for Chats {
    fn training(&self) -> &Arc<TrainingSamples> {
        self.holdout.training()
    }

    fn holdout(&self) -> Vec<u64> {
        self.holdout.held_out()
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    fn read(&self, index: u64) -> Result<Box<dyn Sample>, DataError> {
        Ok(Box::new(self.sample(index)?))
    }

    fn collate(&self, step: Step, samples: &[&dyn Sample]) -> Box<dyn Batch> {
        let samples: Vec<&ChatSample> = samples.iter().map(|sample| sample.content()).collect();
        Box::new(ChatBatch::of(step, &samples))
    }

    fn take_apart(&self, batch: &dyn Batch) -> Vec<Box<dyn Sample>> {
        let chats = batch.content::<ChatBatch>().apart();
        chats.into_iter().map(|chat| Box::new(chat) as Box<dyn Sample>).collect()
    }

    fn damaged_row(&self, index: u64, _fault: &DataError) -> DamagedRow {
        self.holdout.damaged(index)
    }

    fn describe(&self) -> Result<Vec<(&'static str, String)>, DataError> {
        let mut told = vec![("chats", format!("{} chats, {}", self.len(), self.holdout.describe()))];
        if let Some(first) = self.training().get(0) {
            let ChatSample { input_ids, learned, image_grids, .. } = self.sample(first)?;
            let learned = learned.iter().filter(|learned| **learned).count();
            let (tokens, images) = (input_ids.len(), image_grids.len());
            told.push(("first_chat", format!("{tokens} tokens, {learned} of them learned, {images} images")));
        }
        Ok(told)
    }
}
