//! A sample's key by another way than the table of all keys, to hold it against.

use coxswain_data::{DataError, lerobot::rows::Part};
use coxswain_feature_store::{Digest, SampleKey};

use crate::vla_flow::data::{
    dataset::{Dataset, FrameStorage},
    keys::of_frame,
};

impl Dataset {
    /// The key of one sample, from its data file on a disk.
    pub(super) fn sample_key(&self, index: u64) -> Result<SampleKey, DataError> {
        let found = self.catalog.episodes.of_sample(index);
        let (number, episode) =
            found.ok_or(DataError::OutOfRange { what: "sample", index, len: self.len() })?;
        let row = episode.first_row + index - episode.start;
        let read = |row, part| self.rows.block(&self.catalog, episode.file, row, part);
        let fault =
            |feature: &str, fault: &str| self.catalog.row_error(episode.file, row, feature, fault.into());
        let mut images = Vec::new();
        for back in self.settings.observation.rows_back() {
            let frame = (index - episode.start).saturating_sub(back);
            let row = episode.first_row + frame;
            for camera in &self.cameras {
                images.push(match camera.stored {
                    FrameStorage::Images(column) => {
                        let block = read(row, Part::Camera(column))?;
                        let encoded = block.image(row);
                        let encoded =
                            encoded.ok_or_else(|| fault(&camera.name, "no image bytes in the row"))?;
                        Digest::of_image(encoded)
                    }
                    FrameStorage::Video(video) => {
                        let (path, from) = self.frames.place(&self.catalog, video, number)?;
                        let file = Digest::of_file(&path).map_err(DataError::io(&path, "read"))?;
                        of_frame(&file, from, frame)
                    }
                });
            }
        }
        let numbers = read(row, Part::Numbers)?;
        let text = self.catalog.tasks.get(&numbers.keys[2][(row - numbers.first_row) as usize]);
        let text = text.ok_or_else(|| fault("task_index", "its task has no text in meta/tasks"))?;
        Ok(SampleKey::new(&images, &self.prompt.render(text)))
    }
}
