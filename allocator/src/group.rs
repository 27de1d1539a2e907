/// Placeholder.
#[derive(Clone, Debug)]
pub struct Group;
