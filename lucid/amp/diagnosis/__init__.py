"""What float16 does to a model: causes told, modules watched, ranges measured."""
