"""Operations, frames and types of the wire: pure."""
