from swift.trainers import patcher as patcher
