//! Parquet files: a footer, and values of one column with the levels that say how they nest.
//!
//! Parquet's own column readers, not Arrow's arrays: all that is stored here is numbers, bytes and texts in
//! few shapes, and Arrow's crates, which know all others, were a fifth of what building `cox` costs.

use std::{
    io::{self, BufRead, BufReader, Read},
    ops::Range,
    path::Path,
    sync::Arc,
};

use bytes::Bytes;

use coxswain_video::LFS_POINTER;
use parquet::{
    basic::{Compression, ConvertedType, LogicalType, SortOrder, Type as Physical},
    column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader, get_typed_column_reader},
    data_type::{ByteArray, ByteArrayType, DataType, DoubleType, FloatType},
    errors::ParquetError,
    file::{
        metadata::{ColumnChunkMetaData, ParquetMetaData, ParquetMetaDataReader, RowGroupMetaData},
        reader::{ChunkReader, Length},
        serialized_reader::SerializedPageReader,
    },
    schema::types::{ColumnDescriptor, Type},
};

use super::thrift;
use crate::{
    error::DataError,
    place::{self, Content},
    surviving::surviving,
};

/// A small file, read column by column.
pub struct Table<'a> {
    path: &'a Path,
    metadata: ParquetMetaData,
}

impl<'a> Table<'a> {
    /// Reads the footer of the file at `path`.
    pub fn read_footer(path: &'a Path) -> Result<Self, DataError> {
        Ok(Self { path, metadata: footer(path)? })
    }

    /// Columns' names.
    pub fn names(&self) -> Vec<&str> {
        self.metadata.file_metadata().schema().get_fields().iter().map(|field| field.name()).collect()
    }

    /// All rows of the integers called `name`, as [`Column::integers`] has them; `None` if there are none.
    pub fn integers(&self, name: &str) -> Result<Option<Vec<Option<i64>>>, DataError> {
        self.rows(self.leaf(|c| c.name() == name), |column| column.integers())
    }

    /// All rows of the numbers called `name`; `None` if there are none.
    pub fn floats(&self, name: &str) -> Result<Option<Vec<Option<f64>>>, DataError> {
        let leaf = |kind| self.leaf(|c| c.name() == name && c.physical_type() == kind);
        if let Some(leaf) = leaf(Physical::DOUBLE) {
            return self.rows(Some(leaf), |column| {
                column.by_row(get_typed_column_reader::<DoubleType>(column.reader()?), Some).map(Some)
            });
        }
        if let Some(leaf) = leaf(Physical::FLOAT) {
            return self.rows(Some(leaf), |column| {
                let reader = get_typed_column_reader::<FloatType>(column.reader()?);
                column.by_row(reader, |number| Some(f64::from(number))).map(Some)
            });
        }
        let number = |number: Option<i64>| number.map(|number| number as f64);
        Ok(self.integers(name)?.map(|rows| rows.into_iter().map(number).collect()))
    }

    /// All rows of the text called `name`, or of the first text that there is; `None` if there is none.
    pub fn texts(&self, name: &str) -> Result<Option<Vec<Option<String>>>, DataError> {
        let leaf = self.leaf(|c| c.name() == name && is_text(c)).or_else(|| self.leaf(is_text));
        self.rows(leaf, |column| {
            let reader = get_typed_column_reader::<ByteArrayType>(column.reader()?);
            let texts = column.by_row(reader, Some)?.into_iter();
            let text = |text: ByteArray| Ok(text.as_utf8()?.to_string());
            texts.map(|one| one.map(text).transpose()).collect::<Result<_, _>>().map(Some)
        })
    }

    /// The first leaf that is a column of its own and passes `fits`.
    fn leaf(&self, fits: impl Fn(&ColumnDescriptor) -> bool) -> Option<usize> {
        let columns = self.metadata.file_metadata().schema_descr().columns();
        columns.iter().position(|c| c.path().parts().len() == 1 && c.max_rep_level() == 0 && fits(c))
    }

    /// All rows of a leaf; none where `read` finds none of the kind that it reads.
    fn rows<V>(
        &self,
        leaf: Option<usize>,
        read: impl Fn(&Column<'_>) -> Result<Option<Vec<V>>, ParquetError>,
    ) -> Result<Option<Vec<V>>, DataError> {
        let Some(leaf) = leaf else { return Ok(None) };
        let file = Chunks::open(self.path)?;
        file.bring(self.metadata.row_groups().iter().map(|group| span(group, leaf)))?;
        let mut rows = Vec::new();
        for group in self.metadata.row_groups() {
            let all = Rows { skip: 0, count: group.num_rows().max(0) as usize };
            let column = Column::new(file.clone(), group, leaf, all);
            let Some(more) = parsing(self.path, || read(&column))? else { return Ok(None) };
            rows.extend(more);
        }
        Ok(Some(rows))
    }
}

/// No file with a row is smaller, and every pointer of Git LFS is.
const SMALLEST: u64 = 200;

/// The footer of the file at `path`.
pub fn footer(path: &Path) -> Result<ParquetMetaData, DataError> {
    let file = Chunks::open(path)?;
    let len = file.0.len();
    file.bring([len.saturating_sub(FOOTER_BYTES)..len])?;
    let is_small = file.0.len() < SMALLEST;
    if is_small && file.get_bytes(0, LFS_POINTER.len()).is_ok_and(|begin| begin == LFS_POINTER) {
        let remedy = "download the real file: `git lfs pull` in the data set's directory";
        return Err(DataError::invalid(path, "(file)", "a Git LFS pointer, not the file", remedy));
    }
    let metadata = parsing(path, || {
        if let Some(metadata) = in_footer(&file)? {
            thrift::sound(&mut &metadata[..], thrift::FOOTER)?;
        }
        ParquetMetaDataReader::new().parse_and_finish(&*file)
    })?;
    let columns = metadata.row_groups().iter().flat_map(RowGroupMetaData::columns);
    match columns.map(|column| (column, column.compression())).find(|(_, codec)| !is_decoded(*codec)) {
        Some((column, codec)) => {
            let name = codec.to_string();
            let name = name.split('(').next().unwrap_or(&name);
            let found = format!("compressed with {name}, which is not supported");
            Err(DataError::invalid(path, format!("column {}", column.column_path().string()), found, TO_ZSTD))
        }
        None => Ok(metadata),
    }
}

/// The file is whole: it has to be written in another way.
const TO_ZSTD: &str = "rewrite the file, in Python: `import pyarrow.parquet as pq; \
                       pq.write_table(pq.read_table(FILE), FILE, compression=\"zstd\")`";

fn is_decoded(codec: Compression) -> bool {
    use Compression::{GZIP, SNAPPY, UNCOMPRESSED, ZSTD};
    matches!(codec, UNCOMPRESSED | SNAPPY | GZIP(_) | ZSTD(_))
}

/// What comes before a file's last eight bytes, which say how much that is; `None` without a footer.
fn in_footer(file: &Chunks) -> Result<Option<Bytes>, ParquetError> {
    let Some(end) = file.0.len().checked_sub(8) else { return Ok(None) };
    let tail = file.get_bytes(end, 8)?;
    let Some((length, b"PAR1")) = tail.split_first_chunk() else { return Ok(None) };
    let length = u32::from_le_bytes(*length);
    let begin = end.checked_sub(length.into());
    begin.map(|begin| file.get_bytes(begin, length as usize)).transpose()
}

/// What parquet's readers make of a file. They panic on some garbled bytes, as on a page of a dictionary that
/// is not there.
fn parsing<V>(path: &Path, read: impl FnOnce() -> Result<V, ParquetError>) -> Result<V, DataError> {
    let broken = |error| DataError::parquet(path, error);
    surviving(|| read().map_err(broken), |fault| broken(ParquetError::General(fault)))
}

/// What footers have at most, but for those of files with thousands of row groups.
const FOOTER_BYTES: u64 = 64 << 10;

/// A file as parquet's readers take it.
pub struct Chunks(Arc<dyn Content>);

impl Chunks {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Arc<Self>, DataError> {
        Ok(Arc::new(Self(place::open(path)?)))
    }

    /// Makes ranges of it quick to read.
    pub fn bring(&self, ranges: impl IntoIterator<Item = Range<u64>>) -> Result<(), DataError> {
        self.0.bring(&ranges.into_iter().collect::<Vec<_>>())
    }
}

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.0.len()
    }
}

impl ChunkReader for Chunks {
    type T = BufReader<place::Reader>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        Ok(BufReader::new(place::Reader::new(self.0.clone(), start)))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let left = self.0.len().saturating_sub(start);
        if length as u64 > left {
            let found = format!("{length} bytes expected at byte {start}, but only {left} are left");
            return Err(ParquetError::EOF(found));
        }
        let mut bytes = vec![0; length];
        self.0.read_at(start, &mut bytes)?;
        Ok(bytes.into())
    }
}

/// [`Chunks`] as readers of pages take them.
struct Pages(Arc<Chunks>);

impl Length for Pages {
    fn len(&self) -> u64 {
        self.0.len()
    }
}

impl ChunkReader for Pages {
    type T = FromHeader;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        Ok(FromHeader { reader: self.0.get_read(start)?, unseen: Some((self.0.clone(), start)) })
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        self.0.get_bytes(start, length)
    }
}

/// What begins with a page's header, if anything is read of it: of pages whose header is known parquet's
/// readers ask for more than they read.
struct FromHeader {
    reader: BufReader<place::Reader>,
    unseen: Option<(Arc<Chunks>, u64)>,
}

impl Read for FromHeader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if let Some((file, start)) = self.unseen.take() {
            // Mostly it is all in the buffer.
            match thrift::sound(&mut self.reader.fill_buf()?, thrift::PAGE) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    thrift::sound(&mut file.get_read(start)?, thrift::PAGE)?;
                }
                found => found?,
            }
        }
        self.reader.read(into)
    }
}

/// Where leaf column `leaf` of a row group lies in its file.
pub fn span(group: &RowGroupMetaData, leaf: usize) -> Range<u64> {
    let column = group.column(leaf);
    let start = column.dictionary_page_offset().unwrap_or(column.data_page_offset()).max(0) as u64;
    start..start.saturating_add(column.compressed_size().max(0) as u64)
}

/// Consecutive rows of a row group.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Rows of the group before them.
    pub skip: usize,
    /// How many.
    pub count: usize,
}

/// Whether a column holds text.
pub(super) fn is_text(descriptor: &ColumnDescriptor) -> bool {
    let text = matches!(descriptor.logical_type_ref(), Some(LogicalType::String | LogicalType::Json))
        || matches!(descriptor.converted_type(), ConvertedType::UTF8 | ConvertedType::JSON);
    descriptor.physical_type() == Physical::BYTE_ARRAY && text
}

/// Whether a column holds decimal fractions.
pub(super) fn is_decimal(descriptor: &ColumnDescriptor) -> bool {
    matches!(descriptor.logical_type_ref(), Some(LogicalType::Decimal(_)))
        || descriptor.converted_type() == ConvertedType::DECIMAL
}

/// Some rows of one leaf column: where its values are to be read.
pub struct Column<'a> {
    file: Arc<Chunks>,
    group: &'a RowGroupMetaData,
    leaf: usize,
    /// Which of the group's rows.
    pub rows: Rows,
}

/// Values of a column, and the levels that say how they nest.
pub struct Values<V> {
    /// Values that are there: nulls and empty lists have none.
    pub present: Vec<V>,
    /// By value, null or empty list: how much of the path to it is there. Empty if all of every path is
    /// always there.
    pub definition: Vec<i16>,
    /// By value, null or empty list: at which of the lists around it a new item begins, 0 for a new row.
    /// Empty without lists.
    pub repetition: Vec<i16>,
}

impl<'a> Column<'a> {
    /// Rows of leaf column `leaf` of `group`.
    pub fn new(file: Arc<Chunks>, group: &'a RowGroupMetaData, leaf: usize, rows: Rows) -> Self {
        Self { file, group, leaf, rows }
    }

    /// What the values are.
    pub fn descriptor(&self) -> &'a ColumnDescriptor {
        self.metadata().column_descr()
    }

    /// The column of the schema that the leaf belongs to.
    pub fn root(&self) -> &'a Type {
        let descriptor = self.group.schema_descr();
        descriptor.get_column_root(self.leaf)
    }

    fn metadata(&self) -> &'a ColumnChunkMetaData {
        self.group.column(self.leaf)
    }

    /// A reader of the column's physical type, for [`Column::read_values`] and [`Column::each`].
    pub fn reader(&self) -> Result<ColumnReader, ParquetError> {
        let all = usize::try_from(self.group.num_rows())?;
        let pages =
            SerializedPageReader::new(Arc::new(Pages(self.file.clone())), self.metadata(), all, None)?;
        Ok(get_column_reader(self.metadata().column_descr_ptr(), Box::new(pages)))
    }

    /// All values.
    pub fn read_values<T: DataType, V>(
        &self,
        mut reader: ColumnReaderImpl<T>,
        convert: impl FnMut(T::T) -> V,
    ) -> Result<Values<V>, ParquetError> {
        let Rows { skip, count } = self.rows;
        let (mut values, mut definition, mut repetition) = (Vec::new(), Vec::new(), Vec::new());
        let skipped = reader.skip_records(skip)?;
        let (found, ..) =
            reader.read_records(count, Some(&mut definition), Some(&mut repetition), &mut values)?;
        complete(skipped + found, skip + count)?;
        Ok(Values { present: values.into_iter().map(convert).collect(), definition, repetition })
    }

    /// By row, of a column without lists: what `convert` makes of its value; `None` for null.
    pub fn by_row<T: DataType, V>(
        &self,
        reader: ColumnReaderImpl<T>,
        convert: impl FnMut(T::T) -> Option<V>,
    ) -> Result<Vec<Option<V>>, ParquetError> {
        let Values { present, definition, .. } = self.read_values(reader, convert)?;
        if definition.is_empty() {
            return Ok(present);
        }
        let there = self.descriptor().max_def_level();
        let mut present = present.into_iter();
        let value = |level: i16| if level == there { present.next().flatten() } else { None };
        Ok(definition.into_iter().map(value).collect())
    }

    /// By row, of a column without lists: its integer, of any width; `None` for null. None at all if the
    /// column holds something else.
    pub fn integers(&self) -> Result<Option<Vec<Option<i64>>>, ParquetError> {
        let descriptor = self.descriptor();
        if descriptor.max_rep_level() > 0 || is_decimal(descriptor) {
            return Ok(None);
        }
        let unsigned = descriptor.sort_order() == SortOrder::UNSIGNED;
        // A table that had a gap when pandas wrote it has its integers as floating point numbers.
        let whole = |v: f64| v.is_finite().then_some(v as i64);
        Ok(Some(match self.reader()? {
            ColumnReader::Int64ColumnReader(r) => self.by_row(r, Some)?,
            ColumnReader::Int32ColumnReader(r) if unsigned => {
                self.by_row(r, |v| Some(i64::from(v as u32)))?
            }
            ColumnReader::Int32ColumnReader(r) => self.by_row(r, |v| Some(i64::from(v)))?,
            ColumnReader::BoolColumnReader(r) => self.by_row(r, |v| Some(i64::from(v)))?,
            ColumnReader::FloatColumnReader(r) => self.by_row(r, |v| whole(f64::from(v)))?,
            ColumnReader::DoubleColumnReader(r) => self.by_row(r, whole)?,
            _ => return Ok(None),
        }))
    }

    /// One row after the other, of a column without lists: its value, or `None` if it is null, for as long as
    /// `take` wants more. Holds one page at a time.
    pub fn each<T: DataType>(
        &self,
        mut reader: ColumnReaderImpl<T>,
        mut take: impl FnMut(Option<T::T>) -> bool,
    ) -> Result<(), ParquetError> {
        let Rows { skip, count } = self.rows;
        let (mut value, mut definition) = (Vec::with_capacity(1), Vec::with_capacity(1));
        let mut found = reader.skip_records(skip)?;
        while found < skip + count {
            definition.clear();
            match reader.read_records(1, Some(&mut definition), None, &mut value)? {
                (0, ..) => break,
                (read, ..) => found += read,
            }
            if !take(value.pop()) {
                return Ok(());
            }
        }
        complete(found, skip + count)
    }
}

fn complete(found: usize, promised: usize) -> Result<(), ParquetError> {
    match found == promised {
        true => Ok(()),
        false => Err(ParquetError::General(format!("{found} rows, but the footer promises {promised}"))),
    }
}
