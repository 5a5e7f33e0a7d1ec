//! Parquet files made on the spot, column by column.

use std::{fs::File, path::Path, sync::Arc};

use parquet::{
    basic::{LogicalType, Repetition, Type as Physical},
    data_type::{ByteArrayType, DataType, FloatType, Int64Type},
    file::{
        properties::WriterProperties,
        writer::{SerializedFileWriter, SerializedRowGroupWriter},
    },
    schema::types::{Type, TypePtr},
};

/// Rows of a column; all of it can be null, as in the files that the lerobot package writes.
pub enum Column {
    /// A number each.
    Integers(Vec<i64>),
    /// A text each.
    Texts(Vec<String>),
    /// Lists of numbers.
    Lists(Vec<Vec<Option<f32>>>),
    /// Lists of so many numbers each in a list.
    ListsOfLists(Vec<Vec<Option<f32>>>, usize),
    /// Structs of `bytes` and `path`.
    Images(Vec<Option<Vec<u8>>>),
}

/// Writes a file of row groups, whose columns are the same.
pub fn write_table(path: &Path, groups: &[Vec<(String, Column)>], properties: WriterProperties) {
    let fields = groups[0].iter().map(|(name, column)| column.schema(name)).collect();
    let schema = Type::group_type_builder("schema").with_fields(fields).build().expect("a schema");
    let file = File::create(path).expect("a file");
    let mut writer =
        SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)).expect("a writer");
    for columns in groups {
        let mut group = writer.next_row_group().expect("a row group");
        columns.iter().for_each(|(_, column)| column.write(&mut group));
        group.close().expect("the row group's end");
    }
    writer.close().expect("a footer");
}

impl Column {
    fn schema(&self, name: &str) -> TypePtr {
        match self {
            Self::Integers(_) => leaf(name, Physical::INT64, None),
            Self::Texts(_) => leaf(name, Physical::BYTE_ARRAY, Some(LogicalType::String)),
            Self::Lists(_) => list(name, leaf("element", Physical::FLOAT, None)),
            Self::ListsOfLists(..) => list(name, list("element", leaf("element", Physical::FLOAT, None))),
            Self::Images(_) => {
                let bytes = leaf("bytes", Physical::BYTE_ARRAY, None);
                let path = leaf("path", Physical::BYTE_ARRAY, Some(LogicalType::String));
                group(name, Repetition::OPTIONAL, None, vec![bytes, path])
            }
        }
    }

    fn write(&self, group: &mut SerializedRowGroupWriter<'_, File>) {
        match self {
            Self::Integers(values) => write::<Int64Type>(group, values, &vec![1; values.len()], None),
            Self::Texts(texts) => {
                let values: Vec<_> = texts.iter().map(|text| text.as_str().into()).collect();
                write::<ByteArrayType>(group, &values, &vec![1; values.len()], None);
            }
            Self::Lists(rows) => {
                // An element begins a row or goes on in its list.
                let begins = |at: usize| i16::from(at > 0);
                write_numbers(group, rows, 3, &begins);
            }
            Self::ListsOfLists(rows, width) => {
                let begins = |at: usize| match at {
                    0 => 0,
                    at if at % width == 0 => 1,
                    _ => 2,
                };
                write_numbers(group, rows, 5, &begins);
            }
            Self::Images(rows) => {
                let values: Vec<_> = rows.iter().flatten().map(|bytes| bytes.clone().into()).collect();
                let definition: Vec<_> = rows.iter().map(|row| 1 + i16::from(row.is_some())).collect();
                write::<ByteArrayType>(group, &values, &definition, None);
                let paths = vec!["frame.png".into(); rows.len()];
                write::<ByteArrayType>(group, &paths, &vec![2; rows.len()], None);
            }
        }
    }
}

/// `there` is the definition level of an element that is no null; `begins` says where in its row one begins
/// what.
fn write_numbers(
    group: &mut SerializedRowGroupWriter<'_, File>,
    rows: &[Vec<Option<f32>>],
    there: i16,
    begins: &dyn Fn(usize) -> i16,
) {
    let elements = || rows.iter().flatten();
    let values: Vec<f32> = elements().copied().flatten().collect();
    let definition: Vec<_> = elements().map(|value| there - i16::from(value.is_none())).collect();
    let repetition: Vec<_> = rows.iter().flat_map(|row| (0..row.len()).map(begins)).collect();
    write::<FloatType>(group, &values, &definition, Some(&repetition));
}

fn write<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, File>,
    values: &[T::T],
    definition: &[i16],
    repetition: Option<&[i16]>,
) {
    let mut column = group.next_column().expect("a column").expect("as many as in the schema");
    column.typed::<T>().write_batch(values, Some(definition), repetition).expect("values and their levels");
    column.close().expect("the column's end");
}

fn leaf(name: &str, physical: Physical, logical: Option<LogicalType>) -> TypePtr {
    let leaf = Type::primitive_type_builder(name, physical).with_repetition(Repetition::OPTIONAL);
    Arc::new(leaf.with_logical_type(logical).build().expect("a leaf"))
}

fn list(name: &str, element: TypePtr) -> TypePtr {
    let items = group("list", Repetition::REPEATED, None, vec![element]);
    group(name, Repetition::OPTIONAL, Some(LogicalType::List), vec![items])
}

fn group(name: &str, repetition: Repetition, logical: Option<LogicalType>, fields: Vec<TypePtr>) -> TypePtr {
    let group = Type::group_type_builder(name).with_repetition(repetition).with_logical_type(logical);
    Arc::new(group.with_fields(fields).build().expect("a group"))
}
