//! Structs that the host gives to kernels, or shares with them. Each is defined once, by [`kernel_structs`]; the headers
//! `*_layout.cuh` of kernels are made of these definitions (`cuda/layout/headers.rs`).

#[cfg(test)]
use std::fmt::Write as _;

/// Defines structs with C's layout. `struct Name as "CudaName"` says what a kernel calls it; `as ""` is a struct whose fields
/// stand in the struct that has it. `field: u64 as "const char*"` says the type that a kernel has for a field, where it is
/// another one than the field's own. Both sides get the comments.
macro_rules! kernel_structs {
    ($(
        $(#[doc = $doc:literal])*
        $(#[derive($($derive:ident),*)])?
        $vis:vis struct $name:ident as $cuda_name:literal {
            $(
                $(#[doc = $field_doc:literal])*
                $field_vis:vis $field:ident: $type:ty $(as $cuda_type:literal)?,
            )*
        }
    )*) => {$(
        $(#[doc = $doc])*
        #[repr(C)]
        $(#[derive($($derive),*)])?
        $vis struct $name {
            $(
                $(#[doc = $field_doc])*
                $field_vis $field: $type,
            )*
        }

        #[cfg(test)]
        impl $crate::types::kernel_struct::KernelType for $name {
            fn struct_layout() -> Option<$crate::types::kernel_struct::StructLayout> {
                use $crate::types::kernel_struct::{FieldLayout, KernelType, StructLayout};
                let fields = vec![$(FieldLayout {
                    name: stringify!($field),
                    docs: vec![$($field_doc),*],
                    declared: [$($cuda_type)?].first().map_or_else(
                        || <$type as KernelType>::declaration(stringify!($field)),
                        |given: &&str| format!("{given} {}", stringify!($field)),
                    ),
                    layout: <$type as KernelType>::struct_layout(),
                    offset: std::mem::offset_of!($name, $field),
                    bytes: size_of::<$type>(),
                }),*];
                let docs = vec![$($doc),*];
                Some(StructLayout { name: $cuda_name, docs, fields, bytes: size_of::<$name>() })
            }

            fn declaration(name: &str) -> String {
                format!("{} {name}", $cuda_name)
            }
        }
    )*};
}
pub(crate) use kernel_structs;

/// A type that kernels have too.
#[cfg(test)]
pub(crate) trait KernelType {
    /// Its fields, if it has some.
    fn struct_layout() -> Option<StructLayout> {
        None
    }

    /// The declaration of a variable in a kernel.
    fn declaration(name: &str) -> String;
}

#[cfg(test)]
macro_rules! numbers {
    ($($type:ty => $cuda_type:literal),+) => {$(
        impl KernelType for $type {
            fn declaration(name: &str) -> String {
                format!("{} {name}", $cuda_type)
            }
        }
    )+};
}

#[cfg(test)]
numbers!(u16 => "unsigned short", u32 => "u32", u64 => "u64", f32 => "float");

#[cfg(test)]
impl<T: KernelType, const LENGTH: usize> KernelType for [T; LENGTH] {
    fn declaration(name: &str) -> String {
        T::declaration(&format!("{name}[{LENGTH}]"))
    }
}

/// A struct as Rust lays it out.
#[cfg(test)]
pub(crate) struct StructLayout {
    /// The kernels' name; empty if its fields stand in the struct that has it.
    pub(crate) name: &'static str,
    pub(crate) docs: Vec<&'static str>,
    pub(crate) fields: Vec<FieldLayout>,
    pub(crate) bytes: usize,
}

#[cfg(test)]
pub(crate) struct FieldLayout {
    pub(crate) name: &'static str,
    pub(crate) docs: Vec<&'static str>,
    /// Its declaration in a kernel.
    pub(crate) declared: String,
    /// Layout of the field's type, if that is a struct.
    pub(crate) layout: Option<StructLayout>,
    /// In bytes, in the struct.
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

#[cfg(test)]
impl StructLayout {
    /// The definition of the struct in a header.
    pub(crate) fn definition(&self) -> String {
        let Self { name, docs, bytes, .. } = self;
        let mut text = comment("", docs);
        let _ = write!(text, "struct {name} {{\n{}}};\n", self.declarations());
        let _ = writeln!(
            text,
            "static_assert(sizeof({name}) == {bytes}, \"the host has another layout\");"
        );
        text
    }

    fn declarations(&self) -> String {
        let of = |field: &FieldLayout| {
            let docs = comment("    ", &field.docs);
            match &field.layout {
                Some(inner) if inner.name.is_empty() => docs + &inner.declarations(),
                _ => format!("{docs}    {};\n", field.declared),
            }
        };
        self.fields.iter().map(of).collect()
    }

    /// The name, offset and size of every field that a kernel has.
    pub(crate) fn offsets(&self) -> Vec<(&'static str, usize, usize)> {
        let of = |field: &FieldLayout| match &field.layout {
            Some(inner) if inner.name.is_empty() => {
                let inside = inner.offsets().into_iter();
                inside.map(|(name, at, bytes)| (name, field.offset + at, bytes)).collect()
            }
            _ => vec![(field.name, field.offset, field.bytes)],
        };
        self.fields.iter().flat_map(of).collect()
    }
}

#[cfg(test)]
fn comment(indent: &str, docs: &[&str]) -> String {
    docs.iter().map(|line| format!("{indent}//{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    kernel_structs! {
        /// Two halves.
        #[derive(Clone, Copy)]
        struct Halves as "" {
            low: u16,
            /// The upper one.
            high: u16,
        }

        /// A struct that has all kinds of fields.
        struct OuterStruct as "Given" {
            address: u64 as "const char*",
            halves: Halves,
            factors: [f32; 3],
        }
    }

    #[test]
    fn a_struct_is_written_as_kernels_have_it() {
        let given = OuterStruct::struct_layout().expect("a struct");
        let text = "\
// A struct that has all kinds of fields.
struct Given {
    const char* address;
    unsigned short low;
    // The upper one.
    unsigned short high;
    float factors[3];
};
static_assert(sizeof(Given) == 24, \"the host has another layout\");
";
        assert_eq!(given.definition(), text);
        let offsets = [("address", 0, 8), ("low", 8, 2), ("high", 10, 2), ("factors", 12, 12)];
        assert_eq!(given.offsets(), offsets);
    }
}
